"""The one exception of the production side."""

from __future__ import annotations


class ProductionError(ValueError):
    """Bad input: where, what was expected, what came and what to do, in one line."""

    def __init__(self, where: str, *, expected: str, came: str, fix: str = "") -> None:
        self.where, self.expected, self.came, self.fix = where, expected, came, fix
        line = f"{where}: expected {expected}, came {came}" + (f"; {fix}" if fix else "")
        super().__init__(" ".join(line.split()))
