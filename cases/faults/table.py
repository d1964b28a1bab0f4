"""The matrix as text: one line a fault, then the totals. Nothing is computed here but counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cases.faults import gates
from cases.faults.catalogue import HISTORY

GATE_TITLES = {
    "allclose": "allclose 1e-2",
    "cosine": "cosine ≥ 0.999",
    "pearson": "Pearson ≥ 0.99",
    "diff": "DeepGEMM diff < 1e-3",
    "top1": "top-1 ≥ 95 %",
}
HEAD = ("id", "caught", "stage", "top-1", "top-3", *gates.NAMES, "scenario")
Row = dict[str, Any]  # a row of ``--json``


def placed(row: Row) -> bool:
    """Whether the first fault of the run is a stage at which it must be reported."""
    return bool(row["caught"]) and row["stage_found"] in row["stage_expected"]


def named(row: Row, within: int) -> bool | None:
    """Whether the cause is among the first; None where the run named none."""
    return row["cause_expected"] in row["causes"][:within] if row["causes"] else None


def cells(row: Row) -> tuple[str, ...]:
    """The texts of one line."""
    if row["caught"] is None:
        return (row["id"], "waits", *[""] * (len(HEAD) - 3), f"for {row['waits_for']}")
    said = [_word(row["gates"].get(g, {}).get("passed"), "passes", "fails") for g in gates.NAMES]
    found = row["stage_found"] or "none"
    stage = "yes" if placed(row) else f"{found}, not {' or '.join(row['stage_expected'])}"
    return (
        row["id"],
        _word(row["caught"], "yes", "NO"),
        stage,
        _word(named(row, 1), "yes", "no"),
        _word(named(row, 3), "yes", "no"),
        *said,
        row["scenario"],
    )


def _word(value: bool | None, yes: str, no: str) -> str:
    return "–" if value is None else yes if value else no


@dataclass(frozen=True)
class Totals:
    """What a whole run comes to."""

    runnable: int
    waiting: int
    caught: int
    placed: int
    explained: int  # rows for which the run named causes at all
    top1: int
    top3: int
    history: int  # entries of the project's own history
    history_top1: int
    misses: dict[str, int]  # gate -> faults that it lets pass
    alarms: dict[str, int]  # gate -> correct stages that it fails
    controls: int

    @property
    def good(self) -> bool:
        """Whether everything that can run was caught and placed."""
        return self.runnable == self.caught == self.placed


def totals(rows: Sequence[Row]) -> Totals:
    """Counts over rows; a correct stage counts once however many faults it is used for."""
    able = [r for r in rows if r["caught"] is not None]
    clean = {(r["stage_expected"][0], r["scenario"]): r["gates_clean"] for r in able if r["gates_clean"]}
    return Totals(
        runnable=len(able),
        waiting=len(rows) - len(able),
        caught=sum(bool(r["caught"]) for r in able),
        placed=sum(map(placed, able)),
        explained=sum(bool(r["causes"]) for r in able),
        top1=sum(bool(named(r, 1)) for r in able),
        top3=sum(bool(named(r, 3)) for r in able),
        history=sum(r["origin"] == HISTORY for r in able),
        history_top1=sum(r["origin"] == HISTORY and bool(named(r, 1)) for r in able),
        misses={g: sum(bool(r["gates"].get(g, {}).get("passed")) for r in able) for g in gates.NAMES},
        alarms={g: sum(not c[g] for c in clean.values()) for g in gates.NAMES},
        controls=len(clean),
    )


def share(part: int, whole: int) -> str:
    """``103 of 105 (98.1 %)``"""
    return f"{part} of {whole}" + (f" ({100 * part / whole:.1f} %)" if whole else "")


def lines(sums: Totals) -> list[str]:
    """The totals in words."""
    text = [f"caught {share(sums.caught, sums.runnable)}, placed {share(sums.placed, sums.runnable)}"]
    if sums.explained:
        text.append(f"named top-1 {share(sums.top1, sums.runnable)}, top-3 {share(sums.top3, sums.runnable)}")
    else:
        text.append("no cause was named: the run makes no diagnosis")
    for gate, title in GATE_TITLES.items():
        alarms = f", fails {share(sums.alarms[gate], sums.controls)} correct stages" if sums.controls else ""
        text.append(f"{title}: lets {share(sums.misses[gate], sums.runnable)} faults pass{alarms}")
    if sums.waiting:
        text.append(f"{sums.waiting} more cannot run yet; their rows say what they wait for")
    return text


def markdown(sums: Totals) -> str:
    """The table of the README."""
    rows = [
        "| | faults caught | correct stages failed |",
        "|---|---|---|",
        f"| **harness, local rows** | **{share(sums.caught, sums.runnable)}**, "
        f"in the right stage {share(sums.placed, sums.runnable)} | – |",
    ]
    rows += [
        f"| {title} | {share(sums.runnable - sums.misses[g], sums.runnable)} | {share(sums.alarms[g], sums.controls)} |"
        for g, title in GATE_TITLES.items()
    ]
    names = f"cause named first: {share(sums.top1, sums.runnable)}; of the project's own history "
    return "\n".join([*rows, "", f"{names}{share(sums.history_top1, sums.history)}."])
