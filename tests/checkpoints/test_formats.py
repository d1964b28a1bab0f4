"""Number formats: encoders against their definition, and the three sides' decoders against each other."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases.checkpoints import formats
from production import weights
from production.nvfp4 import decode_bf16
from reference import fast, nvfp4
from reference import formats as exact

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
SEEDS = st.integers(0, 2**32)


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_bytes(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    return torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)


def e4m3(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """Every E4M3 code but the NaNs."""
    raw = random_bytes(shape, g)
    return torch.where((raw & 0x7F) == 0x7F, 0, raw).view(torch.float8_e4m3fn)


def test_powers_of_two_are_exact() -> None:
    byte = torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    expected = torch.tensor([2.0 ** (b - 127) for b in range(255)], dtype=torch.float64)
    assert torch.equal(formats.scale_values(byte), expected)
    assert torch.equal(exact.e8m0(byte), expected)
    assert torch.equal(weights.e8m0(byte).double(), expected)
    nan = torch.tensor([255], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert all(bool(torch.isnan(f(nan)).all()) for f in (formats.scale_values, exact.e8m0, weights.e8m0))


def test_codes_are_nearest_and_ties_even() -> None:
    x = torch.linspace(-8, 8, 6401)
    codes = formats.e2m1_codes(x)
    gap = (x.double().abs()[:, None] - VALUES).abs()
    best = gap.min(1).values
    chosen = gap[torch.arange(len(x)), (codes & 7).long()]
    assert torch.equal(chosen, best)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert (formats.e2m1_codes(ties) & 1).tolist() == [0] * 7
    assert torch.equal((codes >> 3).bool(), x < 0)


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.integers(1, 5), st.integers(1, 4))
def test_nvfp4_three_ways(seed: int, rows: int, blocks: int) -> None:
    g = drawn(seed)
    packed, scale = random_bytes((rows, 8 * blocks), g), e4m3((rows, blocks), g)
    whole = torch.rand((), generator=g) * 1e-3 + 1e-6
    mine = formats.decode_nvfp4(packed, scale, whole)
    assert torch.equal(mine, nvfp4.decode(packed, scale, whole))
    ours = {"weight": packed, "weight_scale": scale, "weight_scale_2": whole}
    assert torch.equal(mine, weights.operand(ours).decoded())
    divided = formats.decode_nvfp4(packed, scale, 1 / whole.reshape(1), reciprocal=True)
    assert torch.equal(divided, exact.nvfp4_divided(packed, scale, 1 / whole.reshape(1)))
    ours = {"weight": packed, "weight_scale": scale, "weight_global_scale": 1 / whole}
    assert torch.equal(divided, weights.operand(ours).decoded())


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.integers(1, 5), st.integers(1, 4))
def test_mxfp4_three_ways(seed: int, rows: int, blocks: int) -> None:
    g = drawn(seed)
    packed = random_bytes((rows, 16 * blocks), g).view(torch.int8)
    scale = torch.randint(0, 255, (rows, blocks), generator=g, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    mine = formats.decode_mxfp4(packed, scale)
    assert torch.equal(mine, exact.mxfp4(packed, scale))
    fp32 = weights.operand({"weight": packed.view(torch.uint8), "weight_scale": scale}).decoded()
    finite = mine.abs() < 2.0**127  # beyond that fp32 has no value
    assert torch.equal(mine[finite], fp32[finite])


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.integers(1, 300), st.integers(1, 300), st.sampled_from(["F8_E8M0", "F32", "BF16"]))
def test_fp8_three_ways(seed: int, rows: int, columns: int, dtype: str) -> None:
    """Any shape: edge blocks are smaller."""
    g = drawn(seed)
    weight = e4m3((rows, columns), g)
    shape = (-(-rows // 128), -(-columns // 128))
    if dtype == "F8_E8M0":
        scale = torch.randint(100, 150, shape, generator=g, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    else:
        scale = torch.rand(shape, generator=g).to(torch.bfloat16 if dtype == "BF16" else torch.float32)
    mine = formats.decode_fp8(weight, scale)
    assert torch.equal(mine, exact.fp8(weight, scale))
    operand = weights.operand({"weight": weight, "weight_scale_inv": scale})
    assert torch.equal(mine, operand.decoded())
    x = torch.randn(2, columns, generator=g)
    y = operand.product(x).double()
    bound = 2.0**-23 * (columns + 4) * (x.double().abs() @ mine.abs().T)
    assert bool(((y - x.double() @ mine.T).abs() <= bound).all())


@pytest.mark.parametrize("dtype", ["F8_E8M0", "F32", "BF16"])
def test_fp8_encoding(dtype: str) -> None:
    w = torch.randn(200, 300, generator=drawn(1)) * torch.exp(torch.randn(200, 1, generator=drawn(2)))
    weight, scale = formats.encode_fp8(w, dtype)
    assert (weight.shape, scale.shape) == ((200, 300), (2, 3))
    gap = (formats.decode_fp8(weight, scale) - w).abs()
    steps = formats.scale_values(scale).repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert bool((gap <= torch.maximum(w.abs().double() * 2.0**-4 * 1.01, steps * 2.0**-10)).all())
    zero, ones = formats.encode_fp8(torch.zeros(4, 4), dtype)
    assert not bool(formats.decode_fp8(zero, ones).any())


def test_encoders_keep_the_largest_value() -> None:
    w = torch.randn(8, 64, generator=drawn(3))
    top = w.abs().max()
    mxfp4 = formats.decode_mxfp4(*formats.encode_mxfp4(w))
    packed = formats.encode_nvfp4(w, top)
    divided = formats.encode_nvfp4_ct(w, top)
    assert packed.scale_2.shape == () and divided.scale_2.shape == (1,)  # noqa: PT018 - one fact
    assert float(packed.scale.float().max()) == float(divided.scale.float().max()) == 448
    for decoded in (
        mxfp4,
        formats.decode_nvfp4(*packed),
        formats.decode_nvfp4(*divided, reciprocal=True),
    ):
        assert float((decoded - w).abs().max() / top) < 0.17
        assert float(((decoded - w).square().mean() / w.square().mean()).sqrt()) < 0.16
    zeros = torch.zeros(2, 32)
    for encoded in (formats.encode_nvfp4(zeros, torch.ones(())), formats.encode_nvfp4_ct(zeros, torch.ones(()))):
        assert not bool((encoded.scale.float() == 0).any())


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(0, 18))
def test_the_lossless_cast(seed: int, spread: int) -> None:
    """MXFP4 is NVFP4 exactly while no block lies more than 17 powers of two below the largest; -0 codes stay."""
    g = drawn(seed)
    packed = random_bytes((4, 32), g).view(torch.int8)
    scale = torch.full((4, 2), 120, dtype=torch.uint8)
    scale[1, 1] -= spread
    scale = scale.view(torch.float8_e8m0fnu)
    cast = formats.cast_mxfp4_to_nvfp4(packed, scale, 120 - 127)
    assert (cast is None) == (spread > 17)
    if cast is not None:
        assert torch.equal(formats.decode_nvfp4(*cast), formats.decode_mxfp4(packed, scale))
        back = formats.cast_nvfp4_to_mxfp4(*cast, reciprocal=False)
        assert back is not None
        assert torch.equal(back[0], packed)
        assert torch.equal(back[1].view(torch.uint8), scale.view(torch.uint8))


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(1, 4), st.integers(1, 3))
def test_straight_to_bfloat16(seed: int, rows: int, blocks: int) -> None:
    """The table look-ups of both sides give the bits of the exact value rounded once."""
    g = drawn(seed)
    packed, scale = random_bytes((rows, 16 * blocks), g), e4m3((rows, 2 * blocks), g)
    whole = torch.exp(6 * torch.randn((), generator=g) - 8)
    once = nvfp4.to_bfloat16(nvfp4.decode(packed, scale, whole)).view(torch.int16)
    assert torch.equal(fast.nvfp4_bfloat16(packed, scale, whole).view(torch.int16), once)
    assert torch.equal(decode_bf16(packed, scale, whole).view(torch.int16), once)
    divided = nvfp4.to_bfloat16(exact.nvfp4_divided(packed, scale, whole.reshape(1)))
    found = fast.nvfp4_bfloat16(packed, scale, whole.reshape(1), divide=True)
    assert torch.equal(found.view(torch.int16), divided.view(torch.int16))
    power = torch.randint(0, 255, (rows, blocks), generator=g, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    once = nvfp4.to_bfloat16(exact.mxfp4(packed, power)).view(torch.int16)
    assert torch.equal(fast.mxfp4_bfloat16(packed.view(torch.int8), power).view(torch.int16), once)


def test_no_cast_without_powers_of_two() -> None:
    packed = formats.encode_nvfp4(torch.randn(4, 64, generator=drawn(5)), torch.tensor(3.0))
    assert formats.cast_nvfp4_to_mxfp4(*packed, reciprocal=False) is None


def test_operands_of_a_stack_are_those_of_its_experts() -> None:
    g = drawn(7)
    stacks = {
        "nvfp4": {
            "weight": random_bytes((3, 4, 64), g),
            "weight_scale": e4m3((3, 4, 8), g),
            "weight_scale_2": torch.rand(3, generator=g),
        },
        "fp8": {"weight": e4m3((3, 150, 130), g), "weight_scale_inv": torch.rand(3, 2, 2, generator=g)},
        "bf16": {"weight": torch.randn(3, 4, 8, generator=g).bfloat16()},
    }
    for (form, stack), expert in itertools.product(stacks.items(), range(3)):
        assert weights.form_of(stack) == form
        whole, one = weights.operand(stack).decoded()[expert], weights.operand(stack, expert=expert).decoded()
        assert torch.equal(whole, one)
