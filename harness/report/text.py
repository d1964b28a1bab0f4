"""Numbers and untrusted strings as a reader should see them. Escaping for HTML or markdown happens where they land."""

from __future__ import annotations

import re
import unicodedata

MISSING = "–"


def num(value: float | int | bool | None, digits: int = 4) -> str:
    """A figure in at most ``digits`` significant digits."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) or 1000 <= abs(value) < 1e7 or value == int(value):
        return f"{value:,.0f}" if abs(value) < 1e7 else f"{value:.{digits - 1}e}"
    return f"{value:.{digits}g}"


def short(value: float | None) -> str:
    """At most four characters, for a heatmap cell: ``.04 .31 1.2 41 412 4e3``."""
    if value is None:
        return MISSING
    if value >= 9.95e9:
        return ">1e9"
    if 0.995 <= value < 1:
        return ".99"  # 1.0 is for what reached the limit
    for limit, form in ((0.005, "<.01"), (0.995, ".2f"), (9.95, ".1f"), (999.5, ".0f")):
        if value < limit:
            return "0" if value == 0 else form if form[0] == "<" else f"{value:{form}}".removeprefix("0")
    return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")


def ratio(value: float | None) -> str:
    """A multiple of a limit, never rounded onto the limit: what passes reads below 1, what fails above it."""
    if value is None or not 0.9995 <= value < 1.0005 or value == 1:
        return num(value, 3)
    return "0.999" if value < 1 else f"{max(value, 1.000001):.7g}"


def times(value: float | None) -> str:
    """A multiple: ``41.2 ×``."""
    return MISSING if value is None else f"{ratio(value)} ×"


def visible(text: str) -> str:
    """Control and formatting characters written out, so that no string can reorder or hide what stands beside it."""
    return text if text.isascii() and text.isprintable() else "".join(map(_shown, text))


def _shown(c: str) -> str:
    kind = unicodedata.category(c)
    return f"\\u{ord(c):04x}" if kind[0] == "C" or kind in ("Zl", "Zp") else c


def slug(stage: str, mode: str) -> str:
    """A fragment that names a comparison: ``layers.2.attn_core/local``; odd characters become underscores."""
    return re.sub(r"[^\w.\-]", "_", stage, flags=re.ASCII) + "/" + re.sub(r"\W", "_", mode, flags=re.ASCII)


def plural(count: int, noun: str) -> str:
    """``1 stage``, ``1,204 stages``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def size(count: int) -> str:
    """Bytes in the unit that fits."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


def seconds(value: float | None) -> str:
    """A duration: ``0.21 s``, ``19 s``, ``3 min 20 s``."""
    if value is None:
        return MISSING
    if value < 120:
        return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"
    return f"{value // 60:.0f} min {value % 60:.0f} s"
