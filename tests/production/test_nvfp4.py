"""NVFP4: the code table, the packing, the exact fold and what stays out of the product."""

from __future__ import annotations

import pytest
import torch

from production import nvfp4

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
VALUES = torch.tensor(E2M1 + [-v for v in E2M1], dtype=torch.float64)


def test_all_sixteen_codes() -> None:
    assert nvfp4.e2m1_values() == VALUES.tolist()
    assert str(nvfp4.e2m1_values()[8]) == "-0.0"


def test_every_byte_with_every_scale_is_exact_in_bf16() -> None:
    """256 x 256 bytes x scales: the fold is exact, and casting it to bf16 changes nothing."""
    byte = torch.arange(256, dtype=torch.uint8).repeat_interleave(8)  # one block of 16 equal pairs per byte
    weight = byte.repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).unsqueeze(1).repeat(1, 256)
    folded = nvfp4.fold(weight, scale)
    pairs = torch.stack((VALUES[(byte & 15).long()], VALUES[(byte >> 4).long()]), -1).flatten()
    exact = pairs * scale.double().repeat_interleave(16, dim=1)
    assert torch.equal(folded.double().nan_to_num(7e9), exact.nan_to_num(7e9))
    assert torch.equal(folded.bfloat16().double().nan_to_num(7e9), exact.nan_to_num(7e9))
    assert folded.isnan().any(dim=1).sum() == 2  # the two NaN codes


def test_low_nibble_is_the_even_channel() -> None:
    weight = torch.zeros(1, 8, dtype=torch.uint8)
    weight[0, 3] = 0x2 | 0xF << 4  # k = 6: 1.0, k = 7: -6.0
    row = nvfp4.unpack(weight)[0]
    assert row[6] == 1.0
    assert row[7] == -6.0
    assert row.count_nonzero() == 2


def test_blocks_run_along_k() -> None:
    weight = torch.full((2, 24), 0x22, dtype=torch.uint8)  # ones, K = 48
    scale = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).to(torch.float8_e4m3fn)
    assert torch.equal(nvfp4.fold(weight, scale), scale.float().repeat_interleave(16, dim=1))


@pytest.mark.parametrize("shape", [(3, 5), (4, 1, 3)])
def test_decode_applies_the_tensor_scale_in_float64(shape: tuple[int, ...]) -> None:
    *lead, n, blocks = (1, *shape) if len(shape) == 2 else shape
    weight = torch.randint(256, (*lead, n, blocks * 8), dtype=torch.uint8)
    scale = torch.rand(*lead, n, blocks).to(torch.float8_e4m3fn)
    scale_2 = torch.rand(lead) * 1e-4
    exact = nvfp4.fold(weight, scale).double() * scale_2.double().view(*lead, 1, 1)
    assert torch.equal(nvfp4.decode(weight, scale, scale_2), exact)


def test_the_fp4_view_shares_the_bytes() -> None:
    weight = torch.randint(256, (4, 8), dtype=torch.uint8)
    view = nvfp4.as_fp4(weight)
    assert view.dtype == torch.float4_e2m1fn_x2
    assert view.data_ptr() == weight.data_ptr()
    assert torch.equal(view.view(torch.uint8), weight)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_scale_is_found(code: int) -> None:
    codes = torch.randint(0x7F, (7, 3), dtype=torch.uint8)
    assert not nvfp4.has_nan_scale(codes.view(torch.float8_e4m3fn))
    codes[4, 1] = code
    assert nvfp4.has_nan_scale(codes.view(torch.float8_e4m3fn))
