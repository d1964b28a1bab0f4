"""The terminal's view of a run: one line a stage, then what is wrong in words, then the verdict.

On a terminal it is a rich table behind a progress bar; piped, it is plain text, printed while the run goes on. Nothing
is computed here: every figure is read from a record.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from harness.records import Certification, Comparison, Config, Logits, Record, Skip, Summary, Verdict, Weights

if TYPE_CHECKING:
    from rich.progress import Progress

COLUMNS = ("stage", "local", "margin", "cost", "free", "error", "decided by")
WIDTHS = (24, 12, 8, 8, 12, 8, 20)
COLOURS = {"PASS": "green", "FAIL": "bold red", "INVALID": "bold red", "INCONCLUSIVE": "yellow", "SKIPPED": "dim"}


@dataclass
class Row:
    """What is known of one stage so far."""

    stage: str
    local: Comparison | Skip | None = None
    free: Comparison | Skip | None = None

    def add(self, record: Comparison | Skip) -> None:
        if record.mode == "local":
            self.local = record
        else:
            self.free = record

    def cells(self) -> tuple[str, ...]:
        """Text by column."""
        local = self.local if isinstance(self.local, Comparison) else None
        free = self.free if isinstance(self.free, Comparison) else None
        deciding = next((c for c in (local, free) if c and c.tensor), None)
        marks = [] if free is None and local is None else self._marks(local or free)
        return (
            self.stage,
            _verdict(self.local),
            _figure(local.margin if local else None),
            _figure(local.cost if local else None),
            _verdict(self.free),
            _figure(free.cost if free else None),
            " ".join(filter(None, [deciding.tensor if deciding else "", *marks])),
        )

    @staticmethod
    def _marks(row: Comparison | None) -> list[str]:
        if row is None:
            return []
        bypass = "" if row.bypass == "production" else f"[bypass {row.bypass}]"
        return [bypass, "[replaced]" if row.replaced else ""]


def _verdict(record: Comparison | Skip | None) -> str:
    return "" if record is None else "SKIPPED" if isinstance(record, Skip) else str(record.verdict)


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if value < 100 else f"{value:.3g}"


@dataclass
class View:
    """Takes records as they come and prints them; ``finish`` prints what stands below the table."""

    out: TextIO
    rows: dict[str, Row] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    skips: dict[str, list[str]] = field(default_factory=dict)  # reason -> rows
    _printed: int = 0
    _progress: Progress | None = None

    @property
    def rich(self) -> bool:
        """Whether the output is a terminal."""
        return self.out.isatty()

    @contextmanager
    def live(self) -> Iterator[None]:
        """A progress bar while records arrive, on a terminal only."""
        if not self.rich:
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(file=self.out), transient=True) as progress:
            self._progress = progress
            progress.add_task("loading", total=None)
            yield
        self._progress = None

    def add(self, record: Record) -> None:
        """Show one record."""
        if isinstance(record, Config):
            self._config(record)
        elif isinstance(record, Certification) and not record.ok:
            self.notes.append(f"not certified: {record.name}: {record.detail}")
        elif isinstance(record, Weights) and record.verdict != Verdict.PASS:
            self.notes.append(f"{record.verdict} weights {record.stage}.{record.parameter}: {record.reason}")
        elif isinstance(record, Comparison | Skip):
            self._row(record)
        elif isinstance(record, Logits):
            figures = (record.entropy_production, record.entropy_reference, record.kl, record.top1_agreement)
            mine, theirs, kl, top1 = ("-" if f is None else f"{f:.4g}" for f in figures)
            self.notes.append(f"logits: entropy {mine} (reference {theirs}), KL {kl}, top-1 agreement {top1}")

    def finish(self, summary: Summary) -> None:
        """The table (on a terminal), the notes and the verdict, which is the last line."""
        self._flush(len(self.rows))
        if self.rich:
            self._table()
        for reason, rows in self.skips.items():
            where = rows[0] if len(rows) == 1 else f"{len(rows)} rows from {rows[0]} on"
            self._print(f"SKIPPED {where}: {reason}")
        for note in self.notes:
            self._print(note)
        total = summary.seconds.get("total")
        if total is not None:
            self._print(f"{total:.1f} s, peak memory {summary.peak_rss_bytes / 2**20:.0f} MiB")
        style = COLOURS.get(str(summary.verdict), "")
        self._print(summary.line, style)

    def _config(self, config: Config) -> None:
        layers = ",".join(map(str, config.layers)) or "none"
        head = f"{config.case}: {config.batch} x {config.length} tokens, layers {layers}, {config.dtype}"
        if config.direct_residual:
            head += ", direct residual"
        self._print(head)
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], description="comparing", total=config.planned or None)
        if not self.rich:
            self._print(_plain(COLUMNS))

    def _row(self, record: Comparison | Skip) -> None:
        if record.stage not in self.rows:
            self._flush(len(self.rows))
            self.rows[record.stage] = Row(record.stage)
        self.rows[record.stage].add(record)
        if self._progress is not None:
            self._progress.advance(self._progress.task_ids[0])
        if isinstance(record, Skip):
            self.skips.setdefault(record.reason, []).append(f"{record.stage} ({record.mode})")
        elif record.verdict not in (Verdict.PASS, Verdict.SKIPPED):
            tensor = f" {record.tensor}:" if record.tensor else ""
            self.notes.append(f"{record.verdict} {record.stage} ({record.mode}):{tensor} {record.reason}")

    def _flush(self, count: int) -> None:
        """Print finished rows (plain text only)."""
        if not self.rich:
            for row in list(self.rows.values())[self._printed : count]:
                self._print(_plain(row.cells()))
        self._printed = count

    def _print(self, text: str, style: str = "") -> None:
        if not self.rich:
            print(text, file=self.out, flush=True)
            return
        from rich.console import Console
        from rich.text import Text

        console = self._progress.console if self._progress is not None else Console(file=self.out)
        console.print(Text(text, style=style))

    def _table(self) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in COLUMNS:
            table.add_column(name, justify="right" if name in ("margin", "cost", "error") else "left", no_wrap=True)
        layer: str | None = None
        for row in self.rows.values():
            scope = row.stage.rpartition(".")[0]
            if layer is not None and scope != layer:
                table.add_section()
            layer = scope
            table.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in row.cells()))
        Console(file=self.out).print(table)


def _plain(cells: tuple[str, ...]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()
