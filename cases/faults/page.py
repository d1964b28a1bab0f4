"""The matrix as one offline page: no script, no request, every text escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from cases.faults import table
from cases.faults.table import Row

STYLE = """
:root { color-scheme: light dark; font: 14px/1.4 system-ui, sans-serif; }
body { margin: 2rem auto; max-width: 90rem; padding: 0 1rem; }
table { border-collapse: collapse; } th { text-align: left; position: sticky; top: 0; background: Canvas; }
td, th { padding: .15rem .6rem .15rem 0; vertical-align: top; }
td, th { border-bottom: 1px solid color-mix(in srgb, CanvasText 15%, Canvas); }
tr.missed td { color: #c22; font-weight: 600; } tr.waits td { opacity: .6; }
td.passes { background: color-mix(in srgb, #c22 25%, Canvas); } small { opacity: .7; }
"""


def page(rows: Sequence[Row]) -> str:
    """The whole page. A gate that lets a fault pass is shaded."""
    totals = "".join(f"<li>{escape(line)}</li>" for line in table.lines(table.totals(rows)))
    head = "".join(f"<th>{escape(title)}</th>" for title in table.HEAD)
    body = "\n".join(map(_row, rows))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Faults</title>'
        f"<style>{STYLE}</style><h1>Faults planted in production</h1><ul>{totals}</ul>"
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></html>\n"
    )


def _row(row: Row) -> str:
    kind = "waits" if row["caught"] is None else "" if table.placed(row) else "missed"
    first, *rest = table.cells(row)
    origin = row["origin"]
    link = f'<a href="{escape(origin)}">{escape(origin)}</a>' if origin.startswith("https://") else escape(origin)
    name = f"<td><b>{escape(first)}</b><br>{escape(row['cause'])}<br><small>{link}</small></td>"
    cells = "".join(f'<td class="{"passes" if c == "passes" else ""}">{escape(c)}</td>' for c in rest)
    return f'<tr class="{kind}">{name}{cells}</tr>'
