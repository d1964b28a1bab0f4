"""Rotary tables against mpmath-free float64 formulas, the rotation, its inverse, and the choice of table."""

from __future__ import annotations

import math

import pytest
import torch

from production.build import Model
from production.config import Rope, Yarn
from production.errors import ProductionError
from production.rope import frequencies, rotate, table
from tests.production.check import V, assert_rounded, run

CPU = torch.device("cpu")
PLAIN = Rope(10000.0, 64)
YARN = Rope(160000.0, 64, Yarn(16.0, 65536, 32.0, 1.0))


def test_plain_frequencies() -> None:
    exact = [10000.0 ** (-2 * i / 64) for i in range(32)]
    assert torch.allclose(frequencies(PLAIN, CPU), torch.tensor(exact, dtype=torch.float64), rtol=1e-15)


def test_yarn_keeps_fast_dims_stretches_slow_ones_and_ramps_between() -> None:
    """Written from the definition: a dim turns original * f / 2 pi times; 32 turns or more stay, 1 or fewer stretch."""
    found = frequencies(YARN, CPU)
    plain = [160000.0 ** (-2 * i / 64) for i in range(32)]
    low = math.floor(32 * math.log(65536 / (32 * 2 * math.pi)) / math.log(160000))
    high = math.ceil(32 * math.log(65536 / (1 * 2 * math.pi)) / math.log(160000))
    assert (low, high) == (15, 25)  # rounded outwards
    for i, f in enumerate(plain):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        assert found[i] == pytest.approx(f / 16 * ramp + f * (1 - ramp), rel=1e-14)
    assert found[15] == pytest.approx(plain[15], rel=1e-14)
    assert found[25] == pytest.approx(plain[25] / 16, rel=1e-14)


@pytest.mark.parametrize("rope", [PLAIN, YARN])
def test_table_is_the_rounded_float64_table_up_to_a_million(rope: Rope) -> None:
    positions = torch.tensor([[0, 1, 127, 4095, 65537, 1_000_003]])
    cos, sin = table(rope, positions)
    for p, position in enumerate(positions[0].tolist()):
        for i, f in enumerate(frequencies(rope, CPU).tolist()):
            assert cos[0, p, i].item() == torch.tensor(math.cos(position * f)).item()
            assert sin[0, p, i].item() == torch.tensor(math.sin(position * f)).item()
    assert (cos.double() ** 2 + sin.double() ** 2 - 1).abs().max() < 4 * V  # no amplitude


def test_interleaved_pairs_in_the_last_channels_only() -> None:
    x = torch.randn(1, 1, 20)
    angle = torch.tensor([0.3, 1.1])
    y = rotate(x, angle.cos(), angle.sin())
    assert torch.equal(y[..., :16], x[..., :16])
    for i, (a, b) in enumerate(((16, 17), (18, 19))):
        turned = complex(x[0, 0, a], x[0, 0, b]) * complex(math.cos(angle[i]), math.sin(angle[i]))
        assert complex(y[0, 0, a], y[0, 0, b]) == pytest.approx(turned, rel=1e-6)


def test_inverse_undoes_and_norms_are_kept() -> None:
    x = torch.randn(2, 9, 3, 32)
    cos, sin = (t.unsqueeze(2) for t in table(YARN, torch.randint(100_000, (2, 9))))
    x = torch.randn(2, 9, 3, 96)
    y = rotate(x, cos, sin)
    assert (rotate(y, cos, sin, inverse=True) - x).abs().max() < 1e-6
    assert (y.norm(dim=-1) - x.norm(dim=-1)).abs().max() < 1e-5
    assert not torch.equal(x, y)


@pytest.mark.parametrize(
    ("name", "kind"), [("layers.0.q_rope", "main"), ("layers.1.q_rope", "compress"), ("layers.2.q_rope", "compress")]
)
def test_the_layer_type_chooses_the_table(native: Model, name: str, kind: str) -> None:
    positions = torch.arange(40).expand(2, -1)
    tables = run(native.stage("rope_cache"), positions=positions)
    q = torch.randn(2, 40, 4, 32).bfloat16()
    got = run(native.stage(name), q=q, **tables)["q"]
    cos, sin = (tables[f"{kind}_{part}"].double().unsqueeze(2) for part in ("cos", "sin"))
    a, b = q.double()[..., 16::2], q.double()[..., 17::2]
    exact = q.double().clone()
    exact[..., 16::2], exact[..., 17::2] = a * cos - b * sin, b * cos + a * sin
    assert_rounded(got, exact, 4 * V * q.double().abs().amax(-1, keepdim=True))
    assert torch.equal(got[..., :16], q[..., :16])


def test_unrope_takes_the_inverse(native: Model) -> None:
    tables = native.stage("rope_cache").run(positions=torch.arange(30).unsqueeze(0))
    x = torch.randn(1, 30, 4, 32).bfloat16()
    turned = native.stage("layers.3.q_rope").run(q=x, **tables)["q"]
    back = run(native.stage("layers.3.attn_unrope"), out=turned, **tables)["out"]
    assert (back.float() - x.float()).abs().max() <= 2**-6 * x.float().abs().max()
    assert torch.equal(back[:, 0], x[:, 0])  # position 0 is not turned


def test_bf16_tables_are_taken(native: Model) -> None:
    """A reference that rounds its table hands it over in bf16."""
    tables = native.stage("rope_cache").run(positions=torch.arange(5).unsqueeze(0))
    tables = {name: t.bfloat16() for name, t in tables.items()}
    run(native.stage("layers.0.kv_rope"), kv=torch.randn(1, 5, 32).bfloat16(), **tables)


def test_negative_positions_are_refused(native: Model) -> None:
    with pytest.raises(ProductionError, match="absolute positions >= 0, came -1"):
        native.stage("rope_cache").run(positions=torch.tensor([[3, -1]]))
