"""How a case is cut into calls: ``prefill``, ``chunk:SIZES`` or ``decode:K``. Numbers only, no tensors.

prefill        all tokens in one call that starts from empty caches
chunk:SIZES    calls of these sizes (``chunk:128``, ``chunk:1,3,5``); the last size repeats until the tokens are used up
decode:K       the last K tokens one by one, all before them in one call

The last call is the one whose stages are compared; those before it fill the caches.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.types import UsageError

FORMS = "prefill, chunk:SIZES or decode:K"


@dataclass(frozen=True)
class Phase:
    """A cut of a case into calls. ``sizes``: chunk sizes; ``steps``: single tokens at the end."""

    text: str
    sizes: tuple[int, ...] = ()
    steps: int = 0

    def calls(self, length: int) -> list[int]:
        """Tokens of each call, the compared one last."""
        if self.steps >= length:
            raise UsageError(
                f"--phase {self.text}: the case has {length} tokens; expected at least one more than the {self.steps} "
                "that are decoded"
            )
        if not self.sizes:
            return [length - self.steps, *[1] * self.steps]
        made: list[int] = []
        while (left := length - sum(made)) > 0:
            made.append(min(left, self.sizes[min(len(made), len(self.sizes) - 1)]))
        return made


def parse(text: str) -> Phase:
    """The phase that ``--phase`` names."""
    kind, sign, rest = text.strip().partition(":")
    if kind == "prefill" and not sign:
        return Phase("prefill")
    words = rest.split(",") if rest else []
    numbers = [int(w) for w in words if w.isascii() and w.isdigit() and len(w) < 8 and int(w) > 0]
    if not words or len(numbers) != len(words) or kind not in ("chunk", "decode"):
        raise UsageError(f"--phase {text!r}: expected {FORMS}, for example chunk:128 or decode:20")
    if kind == "decode":
        if len(numbers) != 1:
            raise UsageError(f"--phase {text!r}: expected one number of decoded tokens, for example decode:20")
        return Phase(text.strip(), steps=numbers[0])
    return Phase(text.strip(), sizes=tuple(numbers))
