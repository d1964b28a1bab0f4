"""The attention core against float64 loops: masks, window edges, sinks, padding, ragged batches, extremes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from production.attention import attend, pack_keys, padded_length, visible_keys
from production.build import Model
from production.errors import ProductionError
from tests.production.check import V, assert_rounded, run

H, D, W = 4, 32, 16
KINDS = {"sliding": ("layers.0.attn_core", 0), "csa": ("layers.1.attn_core", 4), "hca": ("layers.2.attn_core", 16)}


def row64(q: Tensor, keys: Tensor, sink: float) -> tuple[Tensor, float, float, float]:
    """(out, lse, entropy, sink mass) of one query head over its visible keys."""
    logits = (keys.double() @ q.double()) / D**0.5
    lse = torch.cat((logits, torch.tensor([sink], dtype=torch.float64))).logsumexp(0)
    weights = (logits - lse).exp()
    own = logits.softmax(0) if len(logits) else logits
    entropy = float(-(own * own.clamp(min=1e-300).log()).sum())
    return weights @ keys.double(), float(lse), entropy, math.exp(sink - float(lse))


def inputs_of(kind: str, batch: int, length: int, lengths: list[int] | None = None, top: int = 5) -> dict[str, Tensor]:
    """Random inputs; picks are a random set of ready entries padded with -1."""
    _, rate = KINDS[kind]
    inputs = {
        "q": torch.randn(batch, length, H, D).bfloat16(),
        "kv": torch.randn(batch, length, D).bfloat16(),
        "positions": torch.arange(length).expand(batch, -1),
        "lengths": torch.tensor(lengths or [length] * batch),
    }
    if rate:
        entries = length // rate
        inputs["compressed"] = torch.randn(batch, entries, D).bfloat16()
    if kind == "csa":
        count = min(top, entries)
        picks = torch.full((batch, length, count), -1)
        for b in range(batch):
            for t in range(length):
                ready = torch.randperm((t + 1) // rate)[:count]
                picks[b, t, : len(ready)] = ready
        inputs["picks"] = picks
    return inputs


def visible64(kind: str, inputs: dict[str, Tensor], b: int, t: int) -> list[int]:
    """Columns that query t sees, by the rules in words."""
    length, rate = inputs["kv"].shape[1], KINDS[kind][1]
    valid = int(inputs["lengths"][b])
    seen = [j for j in range(length) if t - W < j <= t and j < valid]
    if kind == "csa":
        seen += sorted(length + int(e) for e in inputs["picks"][b, t] if e >= 0 and (e + 1) * rate <= valid)
    if kind == "hca":
        seen += [length + e for e in range(length // rate) if (e + 1) * rate <= t + 1 and (e + 1) * rate <= valid]
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 3, 4, 15, 16, 17, 35, 130])
def test_against_loops(native: Model, kind: str, length: int) -> None:
    stage = native.stage(KINDS[kind][0])
    inputs = inputs_of(kind, 2, length, [length, max(1, length - 3)])
    got = run(stage, **inputs)
    keys = torch.cat([inputs["kv"], *([inputs["compressed"]] if "compressed" in inputs else [])], dim=1)
    assert got["visible"].shape == (2, length, keys.shape[1])
    for b in range(2):
        for t in {*range(0, length, 7), length - 1}:
            seen = visible64(kind, inputs, b, t)
            assert got["visible"][b, t].nonzero().flatten().tolist() == seen
            for h in range(H):
                sink = float(stage.params["sinks"][h])
                out, lse, entropy, mass = row64(inputs["q"][b, t, h], keys[b, seen], sink)
                assert_rounded(got["out"][b, t, h], out, 100 * V * keys[b].abs().max().double())
                assert got["lse"][b, t, h].item() == pytest.approx(lse, abs=2e-6, rel=2e-6)
                assert got["entropy"][b, t, h].item() == pytest.approx(entropy, abs=5e-6)
                assert got["sink_mass"][b, t, h].item() == pytest.approx(mass, rel=1e-5)


def test_window_edge() -> None:
    """Exactly W keys: the query's own and W - 1 before it."""
    positions = torch.arange(300).unsqueeze(0)
    visible = visible_keys(positions, torch.tensor([300]), 300, window=128)[0]
    for t in (0, 126, 127, 128, 129, 299):
        assert visible[t].nonzero().flatten().tolist() == list(range(max(0, t - 127), t + 1))


def test_earlier_keys_may_precede_the_queries() -> None:
    """Positions are absolute: a window of past keys in front of a chunk sees what one call would."""
    whole = visible_keys(torch.arange(60).unsqueeze(0), torch.tensor([60]), 60, window=W, entries=15, rate=4)
    part = visible_keys(
        torch.arange(40, 60).unsqueeze(0), torch.tensor([35]), 35, window=W, entries=15, rate=4
    )  # keys 25..59
    assert torch.equal(part[0, :, :35], whole[0, 40:, 25:60])
    assert torch.equal(part[0, :, 35:], whole[0, 40:, 60:])


@pytest.mark.parametrize("logical", range(1, 131))
def test_padding_is_never_read(logical: int) -> None:
    """Every logical length, with NaN and huge values behind it: the same bits as zeros there."""
    padded = padded_length(logical)
    assert padded == (128 if logical <= 128 else 256)
    q, kv, sinks = torch.randn(1, 3, H, D).bfloat16(), torch.randn(1, logical, D).bfloat16(), torch.randn(H)
    visible = torch.rand(1, 3, logical) < 0.7
    visible[..., -1] = True
    clean = pack_keys(kv, None, padded)
    poisoned = clean.clone()
    poisoned[:, logical:] = torch.nan
    poisoned[:, logical::2] = 3e38
    lengths = {"logical_len": logical, "padded_len": padded, "detail": True}
    want, got = attend(q, clean, visible, sinks, **lengths), attend(q, poisoned, visible, sinks, **lengths)
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)
    exact, lse, _, _ = row64(q[0, 2, 1], kv[0, visible[0, 2]], float(sinks[1]))
    assert torch.allclose(got.out[0, 2, 1].double(), exact, atol=1e-5)
    assert got.lse is not None
    assert got.lse[0, 2, 1].item() == pytest.approx(lse, abs=1e-5)


def test_lengths_are_two_arguments_and_must_fit() -> None:
    q, keys, visible = torch.randn(1, 1, H, D), torch.zeros(1, 128, D), torch.ones(1, 1, 5, dtype=torch.bool)
    for logical, padded in ((128, 128), (5, 5), (5, 256)):
        with pytest.raises(ProductionError, match="attn_core: key lengths"):
            attend(q, keys, visible, torch.zeros(H), logical_len=logical, padded_len=padded, detail=False)


def test_sink_takes_mass_and_gives_no_value(native: Model) -> None:
    stage, inputs = native.stage("layers.0.attn_core"), inputs_of("sliding", 1, 1)
    out = stage.run(params={"sinks": torch.full((H,), -1e9)}, **inputs)
    assert torch.equal(out["out"][0, 0, 0], inputs["kv"][0, 0])  # one key, no sink
    logit = (inputs["q"][0, 0].double() @ inputs["kv"][0, 0].double()) / D**0.5
    half = stage.run(params={"sinks": logit.float()}, **inputs)
    assert torch.allclose(half["out"][0, 0].double(), inputs["kv"][0, 0].double() / 2, rtol=2**-8)
    assert torch.allclose(half["sink_mass"], torch.full((1, 1, H), 0.5), rtol=1e-4)


def test_a_query_that_sees_nothing(native: Model) -> None:
    stage = native.stage("layers.2.attn_core")
    inputs = inputs_of("hca", 1, 40, [0])
    got = run(stage, **inputs)
    assert not got["visible"].any()
    assert (got["out"] == 0).all()
    assert torch.equal(got["lse"], stage.params["sinks"].expand(1, 40, H))
    assert (got["entropy"] == 0).all()
    assert (got["sink_mass"] == 1).all()


@pytest.mark.parametrize("scale", [1e-3, 30.0, 1e4])
def test_extreme_logits_stay_finite(native: Model, scale: float) -> None:
    stage, inputs = native.stage("layers.1.attn_core"), inputs_of("csa", 1, 60)
    inputs["q"] = (inputs["q"].float() * scale).bfloat16()
    got = run(stage, **inputs)
    for name, value in got.items():
        assert value.isfinite().all() if name != "visible" else True
    assert ((got["entropy"] >= -1e-6) & (got["entropy"] <= math.log(W + 5) + 1e-5)).all()
    deep = stage.run(params={"sinks": torch.full((H,), 1e5)}, **inputs)  # all mass on the sink
    assert (deep["sink_mass"] == 1).all()
    assert torch.allclose(deep["entropy"], got["entropy"], atol=1e-5)  # the sink is no part of it


def test_entropy_of_equal_keys_is_the_log_of_their_number(native: Model) -> None:
    stage, inputs = native.stage("layers.0.attn_core"), inputs_of("sliding", 1, 40)
    inputs["kv"] = inputs["kv"][:, :1].expand(-1, 40, -1)
    entropy = stage.run(**inputs)["entropy"][0]
    for t in range(40):
        assert torch.allclose(entropy[t], torch.full((H,), math.log(min(t + 1, W))), atol=1e-5)


def test_poisoned_rows_beyond_the_length_do_not_reach_valid_queries(native: Model) -> None:
    for kind, (name, rate) in KINDS.items():
        inputs = inputs_of(kind, 2, 37, [37, 21])
        want = native.stage(name).run(**inputs)
        inputs["kv"] = inputs["kv"].clone()
        inputs["kv"][1, 21:] = torch.nan
        if rate:
            inputs["compressed"] = inputs["compressed"].clone()
            inputs["compressed"][1, 21 // rate :] = torch.nan
        got = native.stage(name).run(**inputs)
        for key in ("out", "lse"):
            assert torch.equal(got[key][0], want[key][0])
            assert torch.equal(got[key][1, :21], want[key][1, :21])
            assert got[key].isfinite().all()


def test_blocks_of_queries_do_not_change_the_result(native: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, inputs = native.stage("layers.1.attn_core"), inputs_of("csa", 2, 300)
    want = stage.run(**inputs)
    monkeypatch.setattr("production.attention.QUERY_BLOCK", 37)
    got = stage.run(**inputs)
    assert torch.equal(got["visible"], want["visible"])
    assert (got["out"].float() - want["out"].float()).abs().max() <= 2**-7
    assert torch.allclose(got["lse"], want["lse"], atol=1e-5)


def test_picks_are_a_set(native: Model) -> None:
    stage, inputs = native.stage("layers.1.attn_core"), inputs_of("csa", 1, 40)
    want = stage.run(**inputs)
    inputs["picks"] = torch.cat((inputs["picks"].flip(-1), inputs["picks"]), dim=-1)
    for key, value in stage.run(**inputs).items():
        assert torch.equal(value, want[key])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.tensor([41])}, r"lengths: expected 0..40, came \[41\]"),
        ({"picks": torch.full((1, 40, 2), 10)}, r"picks: expected -1..9, came 10..10"),
        ({"picks": torch.full((1, 40, 2), -2)}, r"picks: expected -1..9, came -2..-2"),
        ({"kv": torch.zeros(1, 39, D).bfloat16()}, "kv: expected at least 40 keys, came 39"),
    ],
)
def test_bad_values_are_refused(native: Model, change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ProductionError, match=message):
        native.stage("layers.1.attn_core").run(**{**inputs_of("csa", 1, 40), **change})
