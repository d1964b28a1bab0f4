"""Generated text on the terminal while it is made: one side plain, two sides in columns that stay in step."""

from __future__ import annotations

import shutil
import unicodedata
from typing import Protocol, TextIO

from harness.generate.pair import Seen

LEAST = 24  # columns a side


class Show(Protocol):
    """Takes steps as they are made."""

    def __call__(self, seen: Seen) -> None: ...
    def pause(self) -> None:
        """Something else is about to be printed."""
        ...


class Plain:
    """One side: its text and nothing else, as it comes."""

    def __init__(self, out: TextIO) -> None:
        self.out, self._open = out, False

    def __call__(self, seen: Seen) -> None:
        text = seen.texts[0] if seen.texts[0] is not None else seen.texts[1]
        self.out.write(text or "")
        self.out.flush()
        self._open = True

    def pause(self) -> None:
        if self._open:
            self.out.write("\n")
            self._open = False


class Columns:
    """Reference on the left, production on the right. A row holds the same steps on both; ``≠`` marks one that differs.

    On a terminal the open row is drawn again with every token; elsewhere a row is printed when it is full.
    """

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.live = out.isatty()
        self.width = max(LEAST, (shutil.get_terminal_size((100, 24)).columns - 4) // 2)
        self._left = self._right = ""
        self._differs = self._begun = False

    def __call__(self, seen: Seen) -> None:
        right, left = (_printable(text or "") for text in seen.texts)
        if not self._begun:
            self._begun = True
            self._write(f"{'reference':<{self.width}} │ production\n")
        if self._left and max(_cells(self._left + left), _cells(self._right + right)) > self.width:
            self._end()
            left, right = left.lstrip(), right.lstrip()
        self._left, self._right = self._left + left, self._right + right
        self._differs |= seen.texts[0] != seen.texts[1]
        if self.live:
            self._write("\r" + self._row())

    def pause(self) -> None:
        if self._left or self._right:
            self._end()

    def _row(self) -> str:
        padding = " " * max(0, self.width - _cells(self._left))
        return f"{self._left}{padding} {'≠' if self._differs else '│'} {self._right}"

    def _end(self) -> None:
        self._write(("\r" if self.live else "") + self._row().rstrip() + "\n")
        self._left = self._right = ""
        self._differs = False

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()


def _printable(text: str) -> str:
    """One line without control characters: a model may say anything."""
    marks = {"\n": "⏎", "\t": " ", "\r": ""}
    return "".join(marks.get(c, c if c.isprintable() else "·") for c in text)


def _cells(text: str) -> int:
    """Terminal cells that a text takes."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1 for c in text)
