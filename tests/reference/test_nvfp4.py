"""NVFP4 decoding against arithmetic on the bits, for every byte and every block scale."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from reference import nvfp4


def e2m1(code: int) -> Fraction:
    """Sign, two exponent bits of bias 1, one mantissa bit."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = Fraction(mantissa, 2) if exponent == 0 else (1 + Fraction(mantissa, 2)) * 2 ** (exponent - 1)
    return -size if code >> 3 else size


def e4m3(code: int) -> Fraction | None:
    """Sign, four exponent bits of bias 7, three mantissa bits; None for NaN (all ones)."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return None
    size = (
        Fraction(mantissa, 8) * Fraction(1, 64)
        if exponent == 0
        else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    )
    return -size if code >> 7 else size


@pytest.mark.parametrize("scale_2", [1.0, 2.0**-8, 6.9754e-05, 0.1])
def test_every_byte_under_every_scale(scale_2: float) -> None:
    # One row a scale; 256 bytes are 512 columns, 32 blocks that all carry the row's scale.
    packed = torch.arange(256, dtype=torch.uint8).expand(256, -1).contiguous()
    codes = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, 32).contiguous()
    whole = torch.tensor(scale_2, dtype=torch.float32)
    got = nvfp4.decode(packed, codes.view(torch.float8_e4m3fn), whole)
    assert got.shape == (256, 512)
    assert got.dtype is torch.float64
    exact = Fraction(float(whole))
    for code in range(256):
        scale = e4m3(code)
        row = got[code].tolist()
        if scale is None:
            assert all(math.isnan(v) for v in row)
            continue
        table = [float(e2m1(nibble) * scale * exact) for nibble in range(16)]
        assert [Fraction(v) for v in table] == [
            e2m1(nibble) * scale * exact for nibble in range(16)
        ]  # float64 holds it
        assert row == [table[nibble] for byte in range(256) for nibble in (byte & 15, byte >> 4)]


def test_blocks_are_sixteen_columns() -> None:
    packed = torch.full((1, 16), 0x22, dtype=torch.uint8)  # ones
    scale = torch.tensor([[1.0, 2.0]]).to(torch.float8_e4m3fn)
    got = nvfp4.decode(packed, scale, torch.tensor(1.0))
    assert got.tolist() == [[1.0] * 16 + [2.0] * 16]


def test_shapes_that_do_not_belong_together() -> None:
    with pytest.raises(ValueError, match="do not describe one matrix"):
        nvfp4.decode(torch.zeros(2, 16, dtype=torch.uint8), torch.ones(2, 1).to(torch.float8_e4m3fn), torch.tensor(1.0))


def test_bfloat16_is_rounded_once() -> None:
    middle = 1 + 2.0**-8  # between 1 and the next bfloat16
    for nudge, expected in ((0.0, 1.0), (2.0**-40, 1 + 2.0**-7), (-(2.0**-40), 1.0)):
        x = torch.tensor([middle + nudge, -(middle + nudge)], dtype=torch.float64)
        assert nvfp4.to_bfloat16(x).tolist() == [expected, -expected]
    odd = 1 + 3 * 2.0**-8  # a middle that ties upward
    for nudge, expected in ((0.0, 1 + 2.0**-6), (-(2.0**-40), 1 + 2.0**-7), (2.0**-40, 1 + 2.0**-6)):
        assert nvfp4.to_bfloat16(torch.tensor([odd + nudge], dtype=torch.float64)).item() == expected


def test_bfloat16_is_the_nearest_for_many() -> None:
    x = torch.randn(20000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    near = nvfp4.to_bfloat16(x).double()
    for other in (near * (1 + 2.0**-7), near * (1 - 2.0**-7)):
        grid = other.to(torch.bfloat16).double()
        assert bool(((x - near).abs() <= (x - grid).abs()).all())
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf], dtype=torch.float64)
    assert torch.equal(nvfp4.to_bfloat16(special).view(torch.int16), special.to(torch.bfloat16).view(torch.int16))
    assert nvfp4.to_bfloat16(torch.tensor([math.nan], dtype=torch.float64)).isnan().all()
