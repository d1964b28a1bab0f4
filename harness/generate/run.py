"""A generation as records: certify, then step after step on both sides, judged in blocks by the oracle.

``follow = "reference"``: both sides go on with the reference's token and its picks, so every step compares two answers
to the same question. A step fails by the rule of free rows (``harness.judge.free``) on its logits, or when production
would have routed a token as no rounding explains. ``follow = "own"``: each side goes on with its own token and picks;
past the first difference they answer different questions, and nothing is judged.

The first step that fails (own: that differs) is run again by the engine as a call that continues from caches, whose
rows name the layer and the stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from harness import case as cases
from harness import engine, history, sides
from harness.case import Case
from harness.generate.block import Block
from harness.generate.pair import Pair, ProductionFailed, Seen, failed
from harness.generate.text import Text
from harness.plan import Request, make_plan
from harness.records import Certification, Config, Record, Step, Summary, Verdict
from harness.types import Check, InvalidRun, StepProduction, StepReference, UsageError

SideName = Literal["both", "production", "reference"]
Follow = Literal["reference", "own"]


@dataclass(frozen=True)
class Wish:
    """What was asked for."""

    max_new_tokens: int = 4096
    temperature: float = 0.0
    seed: int = 0
    side: SideName = "both"
    follow: Follow = "reference"
    bypass: tuple[str, ...] = ()
    replace: tuple[str, ...] = ()
    direct_residual: bool = False

    @property
    def judged(self) -> bool:
        """Whether steps can fail: both sides answer the same question throughout."""
        return self.side == "both" and self.follow == "reference"

    def request(self, phase: str) -> Request:
        """The same wishes for one call."""
        return Request(bypass=self.bypass, replace=self.replace, direct_residual=self.direct_residual, phase=phase)


@dataclass
class Run:
    """One generation. ``records`` drives it; what it has so far is open to whoever shows it."""

    case: Case
    wish: Wish
    command: str = "harness generate"
    clock: engine.Clock = field(default_factory=engine.Clock)
    text: Text = field(init=False)
    prompt: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    pair: Pair | None = None
    #: called with every step as soon as it is made, before it is judged
    watchers: list[Callable[[Seen], None]] = field(default_factory=list)
    _waiting: list[Seen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.text = Text(self.case.checkpoint)

    def records(self) -> Iterator[Record]:
        """All records but the summary. Bad input is a UsageError, a reference that means nothing an InvalidRun."""
        self.prompt = self.text.encode(self.case.prompt) if self.case.prompt is not None else cases.sequence(self.case)
        with self.clock.phase("load"):
            reference, production = self._sides()
            request = self.wish.request("prefill")
            plan = make_plan(reference.stages, production.stages, request)
            ways = history.plain(engine.ways(plan, reference, production, engine.functions(request)))
        yield self._config(engine.config(self.case, request, plan, self.prompt, reference, production))
        pair = self.pair = Pair(reference, production, self.wish, self.text, self.prompt, ways, plan.direct)
        if self.wish.side != "production":
            with self.clock.phase("certify"):
                checks = pair.certify()
            yield from _certified(checks)
        yield from self._generate(pair)
        if self.wish.side != "production" and not plan.direct:
            with self.clock.phase("certify"):
                checks = pair.certify_history()
            yield from _certified(checks)
        if (bad := self.first_fault()) is not None:
            yield from self._replay(bad)

    def rest(self) -> Iterator[Step]:
        """Steps that an interruption left without a judgement."""
        for seen in self._waiting:
            yield self._note(seen.record(Verdict.SKIPPED, "interrupted before the oracle judged it"))
        self._waiting.clear()

    def first_fault(self) -> Step | None:
        """The step to look into: the first that fails, or where each follows its own, the first that differs."""
        if self.wish.judged:
            return next((s for s in self.steps if s.verdict is Verdict.FAIL), None)
        return next((s for s in self.steps if s.agree is False), None) if self.wish.side == "both" else None

    def _sides(self) -> tuple[StepReference, StepProduction]:
        case = self.case
        reference = history.stepped(sides.reference(case.reference, case.checkpoint, case.dtype), "reference")
        production = history.stepped(sides.production(case.production, case.checkpoint, case.dtype), "production")
        if not isinstance(reference, StepReference):
            raise UsageError("reference: expected steps() that certify their history, came none")
        if not isinstance(production, StepProduction):
            raise UsageError("production: expected steps() with sessions of real caches, came none")
        return reference, production

    def _config(self, made: Config) -> Config:
        return replace(made, command=self.command, phase="generate", planned=0, modes=())

    def _generate(self, pair: Pair) -> Iterator[Record]:
        block = Block(pair) if self.wish.judged else None
        for step in range(self.wish.max_new_tokens):
            start = time.perf_counter()
            try:
                seen = pair.step(step)
            except ProductionFailed as error:
                yield from self._judge(block)
                yield self._note(failed(step, pair, str(error)))
                return
            self.clock.seconds["steps"] = self.clock.seconds.get("steps", 0.0) + time.perf_counter() - start
            self._waiting.append(seen)
            for watcher in self.watchers:
                watcher(seen)
            if block is None:
                self._waiting.clear()
                yield self._note(seen.record(*pair.verdict(seen)))
            elif block.full(self._waiting):
                yield from self._judge(block)
            if pair.done:
                break
        yield from self._judge(block)

    def _judge(self, block: Block | None) -> Iterator[Step]:
        """Let the oracle judge what waits."""
        if block is None or not self._waiting:
            return
        with self.clock.phase("oracle"):
            made = block.judge(self._waiting)
        self._waiting.clear()
        for record in made:
            yield self._note(record)

    def _note(self, record: Step) -> Step:
        self.steps.append(record)
        return record

    def _replay(self, step: Step) -> Iterator[Record]:
        """The rows of one step, by the engine: the same past, call by call, and this call's stages."""
        assert self.pair is not None
        past = [*self.prompt, *self.pair.common[: step.step]]
        words = ("--tokens", ",".join(map(str, past)))
        case = self.case.override(tokens=tuple(past), length=len(past), argument=(*self.case.argument, *words))
        request = self.wish.request(f"decode:{step.step}" if step.step else "prefill")
        with self.clock.phase("replay"):
            made = list(engine.run(case, request))
        for record in made:
            if isinstance(record, Summary):
                if record.verdict is Verdict.INVALID:
                    raise InvalidRun(f"step {step.step} could not be run again: {record.reason}")
            elif not isinstance(record, Config):
                yield record


def _certified(checks: Iterable[Check]) -> Iterator[Certification]:
    for check in checks:
        yield Certification(check.name, check.ok, check.detail)
        if not check.ok:
            raise InvalidRun(f"the reference is not the unmodified model: {check.name}: {check.detail}")
