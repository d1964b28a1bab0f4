"""How a case is cut into calls: numbers, and errors that say what was expected."""

from __future__ import annotations

import pytest

from harness.phase import parse
from harness.types import UsageError


@pytest.mark.parametrize(
    ("text", "length", "calls"),
    [
        ("prefill", 20, [20]),
        ("decode:1", 20, [19, 1]),
        ("decode:3", 20, [17, 1, 1, 1]),
        ("chunk:8", 20, [8, 8, 4]),
        ("chunk:20", 20, [20]),
        ("chunk:99", 20, [20]),
        ("chunk:1,3,5", 20, [1, 3, 5, 5, 5, 1]),
    ],
)
def test_calls(text: str, length: int, calls: list[int]) -> None:
    assert parse(text).calls(length) == calls
    assert sum(calls) == length


@pytest.mark.parametrize(
    "text", ["", "decode", "decode:", "decode:0", "decode:1,2", "chunk:", "chunk:0", "chunk:3,x", "prefill:1", "x:1"]
)
def test_what_is_no_phase(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected (prefill, chunk:SIZES or decode:K|one number)"):
        parse(text)


def test_a_case_must_be_longer_than_what_is_decoded() -> None:
    with pytest.raises(UsageError, match="the case has 5 tokens; expected at least one more than the 5"):
        parse("decode:5").calls(5)
