"""``--dump DIR``: the tensors of one row, and a script that needs neither the harness nor the model to recompute it.

Which row: the run's first fault (of the weights audit: the first row of that stage). If nothing fails, the first stage
that ``--stage`` names, its local row if there is one. Otherwise nothing is written. Rows are offered while the run goes
on and at most one of each kind is held, so a dump costs the memory of a few stages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from harness.judge import cost, margin, sample
from harness.records import Comparison, FirstFault, Record, TensorComparison, Verdict, Weights
from harness.types import Judged, Stage, UsageError

NOTHING = "nothing failed; name a stage with --stage to dump one that passes"


@dataclass(frozen=True)
class Row:
    """What one comparison was made of. ``produced`` is by output name, the other witnesses are by wire."""

    stage: Stage
    record: Comparison
    inputs: Mapping[str, Tensor]  # by wire
    produced: Mapping[str, object] = field(default_factory=dict)
    reference: Mapping[str, Tensor] = field(default_factory=dict)
    oracle: Mapping[str, Tensor] = field(default_factory=dict)
    own: Mapping[str, Tensor] = field(default_factory=dict)  # the oracle for the picks that the reference made
    judged: Mapping[str, Judged] = field(default_factory=dict)  # local rows: with the spread


@dataclass
class Keeper:
    """Holds the rows that may be dumped in the end. ``named``: the user chose stages."""

    folder: Path
    named: bool
    _rows: dict[str, Row] = field(default_factory=dict)  # local, free: first fault; weights; named
    _weights: str | None = None

    def see(self, record: Record) -> None:
        """Take note of a failed weights audit: its stage is dumped if no local row fails."""
        if isinstance(record, Weights) and record.verdict == Verdict.FAIL and self._weights is None:
            self._weights = record.stage

    def offer(self, row: Row) -> None:
        """Keep a row if it may be the one."""
        if row.record.verdict == Verdict.FAIL:
            self._rows.setdefault(row.record.mode, row)
        if row.record.stage == self._weights:
            self._rows.setdefault("weights", row)
        if self.named:
            self._rows.setdefault("named", row)

    def write(self, fault: FirstFault | None) -> str:
        """Write the dump; returns a note for the terminal."""
        row = self._rows.get(fault.mode if fault else "named")
        if row is None:
            return f"dump: {f'{fault.stage} has no tensors in this run' if fault else NOTHING}"
        try:
            self.folder.mkdir(exist_ok=True)
            _write(row, self.folder)
        except OSError as error:
            raise UsageError(
                f"--dump: cannot write to {self.folder}: {error.strerror}; name a writable folder with space left"
            ) from error
        return f"dump: {row.record.stage} ({row.record.mode}); recompute with python {self.folder / 'repro.py'}"


def _write(row: Row, folder: Path) -> None:
    from safetensors.torch import save

    stage = row.stage
    declared = {o.name: o for o in stage.outputs}
    wires = {name: o.wire for name, o in declared.items()}
    bounds = {
        name: margin.bound(row.judged[wire], "fp32" if declared[name].role == "picks" else declared[name].dtype)
        for name, wire in wires.items()
        if wire in row.judged and declared[name].role != "exact"
    }
    own = {n: row.own[w] for n, w in wires.items() if w in row.own and row.own[w] is not row.oracle.get(w)}
    files: dict[str, Mapping[str, object]] = {
        "inputs": {argument: row.inputs.get(wire) for argument, wire in stage.inputs.items()},
        "params": stage.params,
        "production": row.produced,
        "reference": {n: row.reference.get(w) for n, w in wires.items()},
        "oracle": {n: row.oracle.get(w) for n, w in wires.items()},
        "own": own,
        "bound": bounds,
    }
    for name, tensors in files.items():
        path = folder / f"{name}.safetensors"
        kept = {key: t.detach().cpu().contiguous().clone() for key, t in tensors.items() if isinstance(t, Tensor)}
        if kept or name == "production":
            path.write_bytes(save(kept))
        else:
            path.unlink(missing_ok=True)  # of an earlier dump
    (folder / "repro.py").write_bytes(Path(__file__).with_name("repro.py").read_bytes())
    text = json.dumps(_said(row.record), indent=1, allow_nan=False)
    (folder / "dump.json").write_text(text + "\n", encoding="utf-8")


def _said(record: Comparison) -> dict[str, Any]:
    """The record as the script reads it."""
    return {
        "stage": record.stage,
        "mode": record.mode,
        "verdict": str(record.verdict),
        "reason": record.reason,
        "component": record.component,
        "replaced": record.replaced,
        "plan": dict(record.plan),
        "command": record.reproduce,
        "outputs": [_output(t, record.mode) for t in record.tensors],
    }


def _output(t: TensorComparison, mode: str) -> dict[str, Any]:
    factor, floor, tokens = (v if isinstance(v := t.threshold.get(k), float) else 0.0 for k in ("F", "floor", "n"))
    least = floor * (factor if mode == "local" else max(cost.FACTOR, sample.luck(tokens)))
    bad_picks = t.role == "picks" and t.mismatches
    worst = list(t.worst[0].index) if t.worst and (t.role != "picks" or bad_picks) else None
    return {
        "name": t.tensor,
        "role": t.role,
        "dims": list(t.dims),
        "verdict": str(t.verdict),
        "reason": t.reason,
        "judged": t.formula is not None,
        "margin": t.margin,
        "cost": t.cost,
        "worst": worst[:-1] if worst and t.role == "picks" else worst,
        "factor": factor,
        "least": least,
        "formula": t.formula,
    }
