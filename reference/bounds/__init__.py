"""The spread that a rounding plan allows around each oracle value, stage by stage.

:func:`spread` is the entry point. The margin rule is |production - oracle| <= h(|y| + delta) + delta with delta =
min(5 rss, total); this package gives rss and total, to first order and without the output's own rounding h. That
rounding is h's part as long as an output's dtype is the one its rounding point declares. docs/numerics.md has the
formulas in one table and what they were measured to catch.
"""

from .stages import spread

__all__ = ["spread"]
