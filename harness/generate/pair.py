"""Both sides of a generation: fed step by step, each with its own caches, and what is seen of each step."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from harness import history
from harness.execute import Way, Wires
from harness.generate import watch
from harness.generate.text import Text
from harness.history import Walk
from harness.judge.figures import number
from harness.records import Step, Verdict
from harness.types import Check, InvalidRun, Session, StepOracle, StepProduction, StepReference, one_line

if TYPE_CHECKING:
    from harness.generate.run import Wish


@dataclass(frozen=True)
class Seen:
    """One step as both sides made it, before the oracle has said anything."""

    step: int
    position: int
    ids: tuple[int, ...]  # that this call fed (the reference's, where each follows its own)
    token: str
    mine: int | None  # choices
    theirs: int | None
    texts: tuple[str | None, str | None]
    logits_mine: Tensor | None  # [V]
    logits_theirs: Tensor | None
    comparable: bool  # both sides had the same past
    attention: tuple[tuple[float | None, ...], tuple[float | None, ...]] = ((), ())
    divergence: tuple[float | None, ...] = ()
    flips: watch.Flips = field(default_factory=watch.Flips)

    def record(
        self, verdict: Verdict, reason: str | None = None, figures: Mapping[str, float | None] | None = None
    ) -> Step:
        """The record of this step with a verdict."""
        both = self.comparable and self.mine is not None and self.theirs is not None
        seen = watch.output(self.logits_mine, self.logits_theirs)
        return Step(
            step=self.step,
            position=self.position,
            token=self.token,
            production=self.texts[0],
            reference=self.texts[1],
            agree=self.mine == self.theirs if both else None,
            verdict=verdict,
            reason=reason,
            kl=seen.kl if both else None,
            entropy_production=seen.entropy_production,
            entropy_reference=seen.entropy_reference,
            attention_production=self.attention[0],
            attention_reference=self.attention[1],
            divergence=self.divergence if both else (),
            router_flips=self.flips.router,
            index_flips=self.flips.index,
            flip_margin=None if self.flips.margin is None else number(self.flips.margin),
            **(figures or {}),
        )


@dataclass
class Voice:
    """What one side says: its choices, and the tokens that it is fed next."""

    next: list[int]
    said: list[int] = field(default_factory=list)  # its choice at each step
    seconds: float = 0.0
    stopped: bool = False


@dataclass
class Pair:
    """Both sides and their caches. A side that was not asked for is not run."""

    reference: StepReference
    production: StepProduction
    wish: Wish
    text: Text
    prompt: Sequence[int]
    ways: Mapping[str, Way]
    direct: Collection[str]
    mine: Voice = field(init=False)
    theirs: Voice = field(init=False)
    common: list[int] = field(default_factory=list)  # tokens that both sides went on with
    calls: list[Tensor] = field(default_factory=list)  # the reference's, ids [1, S] each
    walk: Walk | None = None
    session: Session | None = None
    done: bool = False

    def __post_init__(self) -> None:
        self.mine, self.theirs = Voice(list(self.prompt)), Voice(list(self.prompt))
        if self.wish.side != "production":
            self.walk = Walk(self.reference, direct=self.direct)
        if self.wish.side != "reference":
            tokens = len(self.prompt) + self.wish.max_new_tokens
            ways = {name: history.computed(way) for name, way in self.ways.items()}
            self.session = self.production.session(rows=1, tokens=tokens, ways=ways)

    @cached_property
    def oracle(self) -> StepOracle:
        return self.reference.oracle()

    @cached_property
    def logits_wire(self) -> str:
        """The wire of the model's output: a model-scope stage's ``logits``."""
        return next(o.wire for s in self.reference.stages if s.layer is None for o in s.outputs if o.name == "logits")

    def certify(self) -> list[Check]:
        """The prompt's call, composed stage by stage, against the untouched model."""
        walk, ids = Walk(self.reference), torch.tensor([self.prompt])
        case = walk.inputs(ids)
        return list(self.reference.certify(case, walk.call(ids)))

    def certify_history(self) -> list[Check]:
        """Every call so far, fed to the untouched model: its caches must be those of the composed reference."""
        assert self.walk is not None
        return list(self.reference.certify_history(self.calls, self.walk.state))

    def step(self, step: int) -> Seen:
        """Feed both sides and let each say its next token."""
        same = self.mine.next == self.theirs.next and len(self.common) == step
        ids = tuple(self.theirs.next if self.walk is not None else self.mine.next)
        theirs, logits_theirs = self._reference()
        mine, logits_mine = self._production(logits_theirs is not None)
        noise = None
        if self.wish.temperature > 0:
            size = next(x for x in (logits_theirs, logits_mine) if x is not None).shape[-1]
            noise = watch.gumbel(size, self.wish.seed, step)
        a, b = (
            None if x is None else watch.choose(x, self.wish.temperature, noise) for x in (logits_mine, logits_theirs)
        )
        texts = (self._heard(self.mine, a), self._heard(self.theirs, b))
        position = len(self.prompt) + step
        token = self._go_on(a, b, same)
        flips = watch.Flips()
        if self.wish.judged:
            flips = watch.flips(self.oracle, self.production.stages, mine)
        return Seen(
            step=step,
            position=position,
            ids=ids,
            token=token,
            mine=a,
            theirs=b,
            texts=texts,
            logits_mine=logits_mine,
            logits_theirs=logits_theirs,
            comparable=same,
            attention=tuple(watch.entropies(w, self.reference.stages) for w in (mine, theirs)),  # type: ignore[arg-type]
            divergence=watch.divergence(mine, theirs, self.reference.stages),
            flips=flips,
        )

    def verdict(self, seen: Seen) -> tuple[Verdict, str | None]:
        """The verdict of a step that the oracle does not judge."""
        if self.wish.side != "both":
            return Verdict.SKIPPED, "one side alone"
        if not seen.comparable:
            return Verdict.SKIPPED, "the sides follow different texts"
        return Verdict.PASS if seen.mine == seen.theirs else Verdict.SKIPPED, None

    def _reference(self) -> tuple[Wires, Tensor | None]:
        if self.walk is None or self.theirs.stopped:
            return {}, None
        start = time.perf_counter()
        ids = torch.tensor([self.theirs.next])
        self.calls.append(ids)
        wires = self.walk.call(ids)
        self.theirs.seconds += time.perf_counter() - start
        return wires, wires[self.logits_wire][0, -1]

    def _production(self, replayed: bool) -> tuple[Wires, Tensor | None]:
        if self.session is None or self.mine.stopped:
            return {}, None
        ids = torch.tensor([self.mine.next])
        wires: Wires = {"case.input_ids": ids}

        def tap(stage: str, outputs: Mapping[str, Tensor]) -> None:
            wires.update({f"{stage}.{name}": tensor for name, tensor in outputs.items()})

        given = self.walk.picks[-1] if self.wish.judged and replayed and self.walk is not None else None
        start = time.perf_counter()
        try:
            logits = self.session.feed(ids, replay=given, tap=tap if self.wish.side == "both" else None)
        except InvalidRun:
            raise
        except Exception as error:
            raise ProductionFailed(one_line(error)) from error
        self.mine.seconds += time.perf_counter() - start
        return wires, logits[0, -1]

    def _heard(self, voice: Voice, token: int | None) -> str | None:
        """What a side says, as text that continues what it said before."""
        if token is None:
            return None
        piece = self.text.piece([*self.prompt, *voice.said], token)
        voice.said.append(token)
        return piece

    def _go_on(self, mine: int | None, theirs: int | None, same: bool) -> str:
        """Decide what each side is fed next; returns the token that both go on with, as text."""
        if self.wish.follow == "reference" and self.wish.side != "production":
            assert theirs is not None
            self.mine.next = self.theirs.next = [theirs]
            self.done = theirs in self.text.stop
            piece = self.text.piece([*self.prompt, *self.common], theirs)
            self.common.append(theirs)
            return piece
        for voice, token in ((self.mine, mine), (self.theirs, theirs)):
            if token is not None:
                voice.next = [token]
                voice.stopped = token in self.text.stop
        asked = [v for v, there in ((self.mine, self.session), (self.theirs, self.walk)) if there is not None]
        self.done = all(voice.stopped for voice in asked)
        agreed = mine if mine is not None and (mine == theirs or theirs is None) else theirs if mine is None else None
        if same and agreed is not None:
            piece = self.text.piece([*self.prompt, *self.common], agreed)
            self.common.append(agreed)
            return piece
        return ""


class ProductionFailed(Exception):
    """Production raised in a step: a finding, not a broken run."""


def failed(step: int, pair: Pair, reason: str) -> Step:
    """The record of a step that production did not survive."""
    position = len(pair.prompt) + step
    return Step(step, position, "", None, None, None, Verdict.FAIL, f"production raised {reason}")


def texts(voices: Iterable[Voice], text: Text, prompt: Sequence[int]) -> list[str]:
    """What each side said, as text."""
    return [text.decode([*prompt, *v.said])[len(text.decode(list(prompt))) :] for v in voices]
