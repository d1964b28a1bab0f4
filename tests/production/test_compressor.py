"""CSA and HCA compressors against float64 loops over windows, at every residue of the length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from production.build import Model
from production.compressor import gated_mean, pool_disjoint, pool_overlapping, windows
from production.config import Rope
from production.errors import ProductionError
from production.rope import frequencies
from tests.production.check import assert_rounded, run

D, CSA, HCA = 32, 4, 16
STAGE = {CSA: "layers.1.compressor", HCA: "layers.2.compressor"}


def pooled64(p: dict[str, Tensor], x: Tensor, rate: int) -> Tensor:
    """[T, D] of one row, slot by slot."""
    kv, gate = (x.double() @ p[f"{name}_proj.weight"].T for name in ("kv", "gate"))
    rows = []
    for e in range(len(x) // rate):
        slots = []  # (gate, value) per token and series
        for j in range(rate):
            t = e * rate + j
            g = gate[t] + p["position_bias"][j]
            slots.append((g[-D:], kv[t, -D:]))  # Cb, or the only series
            if rate == CSA and e > 0:
                g = gate[t - rate] + p["position_bias"][j]
                slots.append((g[:D], kv[t - rate, :D]))  # Ca of the window before
        probs = torch.stack([g for g, _ in slots]).softmax(0)
        rows.append((probs * torch.stack([v for _, v in slots])).sum(0))
    return torch.stack(rows) if rows else torch.zeros(0, D, dtype=torch.float64)


def keys64(pooled: Tensor, weight: Tensor, rope: Rope, rate: int) -> Tensor:
    y = weight * pooled / (pooled.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    angle = torch.arange(len(pooled)).double().unsqueeze(-1) * rate * frequencies(rope, torch.device("cpu"))
    a, b, out = y[:, -16::2].clone(), y[:, -15::2].clone(), y.clone()
    out[:, -16::2], out[:, -15::2] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return out


@pytest.mark.parametrize(
    ("rate", "length"),
    [(CSA, n) for n in (1, 3, 4, 5, 6, 7, 8, 41)] + [(HCA, n) for n in (1, 15, 16, 17, 31, 32, 33, 50)],
)
def test_against_loops(native: Model, rate: int, length: int) -> None:
    stage = native.stage(STAGE[rate])
    x = torch.randn(2, length, 64).bfloat16()
    got = run(stage, x=x, positions=torch.arange(length).expand(2, -1))
    assert got["pooled"].shape[1] == length // rate
    p, rope = stage.decoded(), native.config.compress_rope
    for b in range(2):
        pooled = pooled64(p, x[b], rate)
        assert torch.allclose(got["pooled"][b].double(), pooled, rtol=1e-4, atol=1e-5)
        exact = keys64(got["pooled"][b].double(), p["kv_norm.weight"], rope, rate)
        assert_rounded(got["keys"][b], exact, 1e-6 * (1 + exact.abs()))


def test_first_window_gives_its_missing_half_no_weight() -> None:
    """Were the absent Ca slots zeros with gate 0, equal values would not stay equal."""
    kv, gate = torch.ones(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    assert torch.allclose(pool_overlapping(kv, gate), torch.ones(1, 2, 4))


def test_windows_continue_from_a_state(native: Model) -> None:
    """Two calls with the last window handed over give what one call gives."""
    stage = native.stage(STAGE[CSA])
    x = torch.randn(1, 24, 64).bfloat16()
    kv, gate = windows(x, stage.params["position_bias"], stage.params)
    whole = pool_overlapping(kv, gate)
    first = pool_overlapping(kv[:, :2], gate[:, :2])
    rest = pool_overlapping(kv[:, 2:], gate[:, 2:], prior=(kv[:, 1], gate[:, 1]))
    assert torch.equal(torch.cat((first, rest), dim=1), whole)


def test_extreme_gates_choose_one_slot() -> None:
    gate = torch.zeros(1, 1, 4, 2)
    gate[0, 0, 2] = 1e4
    kv = torch.randn(1, 1, 4, 2)
    assert torch.equal(pool_disjoint(kv, gate), kv[:, :, 2])
    assert torch.equal(gated_mean(kv, torch.full_like(gate, -1e30)).isfinite(), torch.ones(1, 1, 2, dtype=torch.bool))


def test_a_later_start_needs_a_state(native: Model) -> None:
    for name in ("compressor", "indexer"):
        stage = native.stage(f"layers.1.{name}")
        inputs = {"x": torch.zeros(1, 8, 64).bfloat16(), "positions": torch.arange(8).unsqueeze(0) + 4}
        if name == "indexer":
            inputs["q_residual"] = torch.zeros(1, 8, 32).bfloat16()
        with pytest.raises(ProductionError, match=f"{name}: positions: expected every row to start at 0"):
            stage.run(**inputs)
