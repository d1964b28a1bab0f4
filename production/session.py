"""Inference with caches: sequences that are fed call after call, alone or several together.

A call takes some tokens of some rows. Rows of unequal counts and lengths go through one pass without padding: the
tokens of all rows stand behind each other in one row of length sum(counts), which is what every stage sees that keeps
nothing between calls. The stages that do keep something run row by row, each on its own caches.

    session = Session(model, tokens=4096)
    logits = session.feed([prompt])[0]          # prefill, in one call or in chunks of any size
    logits = session.feed([[token]])[0]         # decode
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from production import weights
from production.cache.logical import dump, load
from production.cache.sequence import Layout, Store
from production.cache.sequence import Sequence as Cached
from production.component import Call, Params
from production.errors import ProductionError
from production.stage import Stage, require_plain_fp32
from production.steps import StepSide, state_wire, steps

if TYPE_CHECKING:
    from production.build import Model

LOGITS = "lm_head.logits"
QUICK = Call(detail=False)
#: Weights are unpacked to fp32 once, when a session starts, if that takes no more bytes than this.
PREPARED_LIMIT = 4 << 30

#: (stage, inputs that exist, picks to use or None) -> outputs: computes a stage in place of its component
Way = Callable[[Stage, dict[str, Tensor], Tensor | None], Mapping[str, Tensor]]
#: (stage name, row or None for all rows together, outputs)
Tap = Callable[[str, int | None, Mapping[str, Tensor]], None]
Value = Tensor | list[Tensor]  # one for all rows together, or one a row


@dataclass(frozen=True)
class _Step:
    """A stage, with what a call would otherwise look up again."""

    stage: Stage
    params: Params
    compute: Callable[..., dict[str, Tensor]]
    reads: tuple[tuple[str, str], ...]  # (argument, wire)
    writes: tuple[tuple[str, str], ...]  # (output, wire) that a later stage reads
    takes: tuple[str, ...] | None  # what a stage with caches reads besides them; None: it keeps nothing
    picks: str  # wire of the picks that may be replayed, or nothing
    drop: tuple[str, ...]  # wires that no later stage reads


@dataclass(frozen=True)
class _Row:
    """One row of one call."""

    sequence: Cached
    part: slice  # its tokens among those of all rows
    count: int


class Session:
    """Sequences over one model. ``draft``: how many tokens ``rollback`` may take back. ``spare``: rows for forks."""

    def __init__(
        self,
        model: Model,
        *,
        tokens: int = 4096,
        rows: int = 1,
        draft: int = 0,
        spare: int = 0,
        prepared: bool | None = None,
        ways: Mapping[str, Way] | None = None,
        side: StepSide | None = None,
    ) -> None:
        self.model, self.side = model, side or steps(model)
        self.layout = Layout.of(model.config, self.side.stages[0].op.act)
        self.store = Store(self.layout, tokens=tokens, rows=rows + spare, draft=draft, device=model.device)
        self.sequences = [self.store.sequence() for _ in range(rows)]
        self.ways = dict(ways or {})
        self._plan = self._make_plan(_fits(model) if prepared is None else prepared)

    @property
    def lengths(self) -> list[int]:
        """Tokens in the caches of each row."""
        return [s.length for s in self.sequences]

    def feed(
        self,
        tokens: Sequence[Sequence[int] | Tensor | None],
        *,
        last: bool = False,
        replay: Mapping[str, Value] | None = None,
        tap: Tap | None = None,
    ) -> list[Tensor | None]:
        """Continue each row by its tokens; None or nothing: the row sits this call out.

        Returns logits fp32 [count, V] a row (``last``: [1, V], of its last token), None for a row that sat out.
        ``replay`` gives picks to use, by wire; a list has one tensor for each row that takes part. ``tap`` sees every
        output of every stage.
        """
        require_plain_fp32("session")
        ids, rows, order = self._rows(tokens)
        try:
            with torch.no_grad():
                logits = self._run(ids, rows, last, replay or {}, tap)
        except BaseException:
            for row in rows:
                row.sequence.broken = True
            raise
        found: list[Tensor | None] = [None] * len(self.sequences)
        for index, (at, row) in enumerate(zip(order, rows, strict=True)):
            row.sequence.advance(row.count)
            found[at] = logits[0, index : index + 1] if last else logits[0, row.part]
        return found

    def rollback(self, count: int, row: int = 0) -> None:
        """Take back a row's last tokens, as if they had never been fed; at most ``draft``."""
        self.sequences[row].rollback(count)

    def reset(self, row: int = 0) -> None:
        """Forget a row's tokens."""
        self.sequences[row].reset()

    def fork(self, row: int = 0) -> int:
        """A new row with the past of another; what both have in common is stored once. Returns its number."""
        if len(self.sequences) >= self.store.rows:
            raise ProductionError(
                "session: fork",
                expected=f"at most {self.store.rows} rows",
                came="one more",
                fix="build the session with spare=1 or more",
            )
        self.sequences.append(self.sequences[row].fork())
        return len(self.sequences) - 1

    def state(self, row: int = 0) -> dict[str, Tensor]:
        """What a row's caches hold, in logical order, by the wires on which it enters a call; a leading batch of 1."""
        sequence = self.sequences[row]
        return {
            state_wire(layer, name): tensor.unsqueeze(0)
            for layer in self.layout.kinds
            for name, tensor in dump(sequence, layer, sequence.length).items()
        }

    def _make_plan(self, prepared: bool) -> list[_Step]:
        stages = self.side.stages
        last_reader = {wire: i for i, stage in enumerate(stages) for wire in stage.inputs.values()}
        last_reader[LOGITS] = len(stages)
        plan = []
        for i, stage in enumerate(stages):
            takes = getattr(stage.op, "step_takes", None)
            step = _Step(
                stage=stage,
                params=weights.unpacked(stage.params) if prepared and stage.name not in self.ways else stage.params,
                compute=stage.op.compute if takes is None else stage.op.step,  # type: ignore[attr-defined]
                reads=tuple((a, w) for a, w in stage.inputs.items() if takes is None or a in takes),
                writes=tuple((o.name, o.wire) for o in stage.outputs if o.wire in last_reader),
                takes=takes,
                picks=f"{stage.name}.{stage.op.replays}" if stage.op.replays else "",
                drop=tuple(w for w in dict.fromkeys(stage.inputs.values()) if last_reader[w] == i),
            )
            plan.append(step)
        return plan

    def _rows(self, tokens: Sequence[Sequence[int] | Tensor | None]) -> tuple[Tensor, list[_Row], list[int]]:
        if len(tokens) != len(self.sequences):
            came, rows = f"{len(tokens)} lists of tokens", len(self.sequences)
            raise ProductionError("session", expected=f"one list of tokens for each of {rows} rows", came=came)
        given = [torch.as_tensor(t if t is not None else [], dtype=torch.int64).flatten() for t in tokens]
        order = [i for i, t in enumerate(given) if len(t)]
        if not order:
            raise ProductionError("session", expected="at least one token", came="none")
        for i in order:
            self.sequences[i].check_room(len(given[i]))
        ends = list(accumulate(len(given[i]) for i in order))
        rows = [
            _Row(self.sequences[i], slice(end - len(given[i]), end), len(given[i]))
            for i, end in zip(order, ends, strict=True)
        ]
        return torch.cat([given[i] for i in order]).unsqueeze(0).to(self.model.device), rows, order

    def _run(self, ids: Tensor, rows: list[_Row], last: bool, replay: Mapping[str, Value], tap: Tap | None) -> Tensor:
        device = self.model.device
        positions = [torch.arange(r.sequence.length, r.sequence.length + r.count, device=device) for r in rows]
        wires: dict[str, Value] = {"case.input_ids": ids, "case.positions": torch.cat(positions).unsqueeze(0)}
        wires["case.lengths"] = [torch.tensor([r.sequence.length + r.count], device=device) for r in rows]
        ends = torch.tensor([r.part.stop - 1 for r in rows], device=device) if last else None
        for step in self._plan:
            if ends is not None and step.stage.name == "hc_head":
                wires |= {wire: _joined(wires[wire])[:, ends] for _, wire in step.reads}
            outputs: Mapping[str, Value]
            if tap is None and step.stage.name not in self.ways and step.picks not in replay:
                outputs = self._quick(step, rows, wires)
            elif step.takes is None:
                outputs = self._plain(step, wires, replay, tap)
            else:
                outputs = self._with_caches(step, rows, wires, replay, tap)
            for name, wire in step.writes:
                if name in outputs:
                    wires[wire] = outputs[name]
            for wire in step.drop:
                wires.pop(wire, None)
        return _joined(wires[LOGITS])

    def _quick(self, step: _Step, rows: list[_Row], wires: Mapping[str, Value]) -> Mapping[str, Value]:
        """Production's own arithmetic and nothing beside it: what a step of plain decoding is made of."""
        if step.takes is None:
            return step.compute(step.params, QUICK, **{name: _joined(wires[wire]) for name, wire in step.reads})
        layer = step.stage.layer or 0
        made = []
        for index, row in enumerate(rows):
            inputs = {name: _part(wires[wire], index, row.part) for name, wire in step.reads}
            made.append(step.compute(step.params, QUICK, row.sequence.layers[layer], row.sequence.length, **inputs))
        return _by_row(made)

    def _plain(
        self, step: _Step, wires: Mapping[str, Value], replay: Mapping[str, Value], tap: Tap | None
    ) -> Mapping[str, Tensor]:
        """A stage that keeps nothing, for all rows together."""
        stage = step.stage
        inputs = {name: _joined(wires[wire]) for name, wire in step.reads if wire in wires}
        given = replay.get(step.picks)
        picks = None if given is None else _joined(given)
        way = self.ways.get(stage.name)
        if way is not None:
            outputs = way(stage, inputs, picks)
        else:
            call = Call(detail=tap is not None, picks=picks, choice=tap is not None)
            outputs = step.compute(step.params, call, **inputs)
        if tap is not None:
            tap(stage.name, None, outputs)
        return outputs

    def _with_caches(
        self,
        step: _Step,
        rows: list[_Row],
        wires: Mapping[str, Value],
        replay: Mapping[str, Value],
        tap: Tap | None,
    ) -> Mapping[str, Value]:
        """A stage that keeps something, row by row."""
        stage, made = step.stage, list[Mapping[str, Tensor]]()
        given = replay.get(step.picks)
        for index, row in enumerate(rows):
            picks = given[index] if isinstance(given, list) else given
            if stage.name in self.ways:
                inputs = {n: _part(wires[w], index, row.part) for n, w in stage.inputs.items() if w in wires}
                outputs = self._around(stage, row, inputs, picks)
            else:
                inputs = {n: _part(wires[w], index, row.part) for n, w in step.reads if w in wires}
                call = Call(detail=tap is not None, picks=picks, choice=tap is not None)
                cache = row.sequence.layers[stage.layer or 0]
                outputs = step.compute(step.params, call, cache, row.sequence.length, **inputs)
            if tap is not None:
                tap(stage.name, index, outputs)
            made.append(outputs)
        return _by_row(made)

    def _around(self, stage: Stage, row: _Row, inputs: dict[str, Tensor], picks: Tensor | None) -> Mapping[str, Tensor]:
        """Let a way compute a stage with caches: out in logical order, and back in what it returns."""
        layer, sequence, end = stage.layer or 0, row.sequence, row.sequence.length + row.count
        kept = dump(sequence, layer, sequence.length)
        names = {name: wire.rpartition(".")[2] for name, wire in stage.inputs.items() if ".cache." in wire}
        inputs = {**inputs, **{name: kept[content].unsqueeze(0) for name, content in names.items()}}
        if "compressed" in stage.inputs:
            entries = sequence.layers[layer].entries
            assert entries is not None
            inputs["compressed"] = entries.span(0, end // stage.op.settings["compress_rate"]).unsqueeze(0)  # type: ignore[operator]
        outputs = self.ways[stage.name](stage, inputs, picks)
        after = {
            content: outputs["keys" if name == "entries" else name][0]
            for name, content in names.items()
            if ("keys" if name == "entries" else name) in outputs
        }
        load(sequence, layer, end, after)
        return outputs


class Lockstep:
    """A session whose rows have one length: tensors with a batch instead of a list a row."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def feed(
        self,
        input_ids: Tensor,
        *,
        replay: Mapping[str, Tensor] | None = None,
        tap: Callable[[str, Mapping[str, Tensor]], None] | None = None,
    ) -> Tensor:
        """Logits fp32 [B, S, V] of ids [B, S]. ``replay`` gives picks [B, S, ...] by wire."""
        rows: dict[str, Value] = {wire: list(t.split(1)) for wire, t in (replay or {}).items()}
        see = None if tap is None else _Gather(tap, *input_ids.shape)
        logits = self.session.feed(list(input_ids), replay=rows, tap=see)
        if see is not None:
            see.flush()
        return torch.stack([row for row in logits if row is not None])

    def state(self) -> dict[str, Tensor]:
        """What all rows keep, with a leading batch, by the wires on which it enters a call."""
        rows = [self.session.state(row) for row in range(len(self.session.sequences))]
        return {wire: torch.cat([row[wire] for row in rows]) for wire in rows[0]}


class _Gather:
    """Turns what a session's tap sees into one mapping a stage with a batch in front."""

    def __init__(self, tap: Callable[[str, Mapping[str, Tensor]], None], batch: int, count: int) -> None:
        self.tap, self.batch, self.count = tap, batch, count
        self.name, self.rows = "", list[Mapping[str, Tensor]]()

    def __call__(self, name: str, row: int | None, outputs: Mapping[str, Tensor]) -> None:
        if name != self.name:
            self.flush()
        if row is not None:
            self.name = name
            self.rows.append(outputs)
            return
        whole = {n: t.unflatten(1, (self.batch, self.count))[0] for n, t in outputs.items()}
        self.tap(name, whole)

    def flush(self) -> None:
        """Pass on the stage whose rows have all been seen."""
        if self.rows:
            self.tap(self.name, {n: torch.cat([row[n] for row in self.rows]) for n in self.rows[0]})
        self.name, self.rows = "", []


def _fits(model: Model) -> bool:
    """Whether all weights in fp32 stay below the limit."""
    count = 0
    for stage in model.stages:
        for name, tensor in stage.params.items():
            if not name.endswith(weights.COMPANIONS):
                count += tensor.numel() * (2 if tensor.dtype == torch.uint8 else 1)
    return 4 * count <= PREPARED_LIMIT


def _by_row(made: list[Mapping[str, Tensor]]) -> dict[str, Value]:
    """Outputs of each row as one mapping."""
    return {name: [outputs[name] for outputs in made] for name in made[0]}


def _joined(value: Value) -> Tensor:
    """One tensor for all rows: their tokens behind each other."""
    if isinstance(value, list):
        return value[0] if len(value) == 1 else torch.cat(value, dim=1)
    return value


def _part(value: Value, index: int, part: slice) -> Tensor:
    if isinstance(value, list):
        return value[index]
    return value if part.stop - (part.start or 0) == value.shape[1] else value[:, part]
