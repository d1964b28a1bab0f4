"""The oracle against float64 code written from the model's definition, and the proof that it is float64 throughout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.types import InvalidRun, Oracle, UsageError
from reference import build, lift
from reference.oracle import HFOracle, OracleStage
from tests.reference.conftest import LENGTH, arguments

CLOSE = 1e-12


@pytest.fixture(scope="module")
def truth(native: build.HFReference) -> HFOracle:
    side: Oracle = native.oracle()  # the type checker's part
    assert side is native.oracle()
    return native.oracle()


def stage(side: HFOracle, name: str) -> OracleStage:
    return next(s for s in side.stages if s.name == name)


def run(side: HFOracle, name: str, wires: Mapping[str, Tensor], **more: Any) -> dict[str, Tensor]:
    s = stage(side, name)
    return s.run(**more, **arguments(s, wires))


def close(ours: Tensor, theirs: Tensor, bound: float = CLOSE) -> None:
    assert ours.dtype is theirs.dtype is torch.float64
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= bound * float(theirs.abs().max())


def leaf(side: HFOracle, name: str) -> dict[str, Tensor]:
    return dict(stage(side, name).decoded())


def norm(x: Tensor, weight: Tensor | float, eps: float = 1e-6) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) * weight


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def turn(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate pairs of the last channels as complex numbers; ``angle`` broadcasts against the pairs."""
    width = 2 * angle.shape[-1]
    pairs = torch.view_as_complex(x[..., -width:].reshape(*x.shape[:-1], -1, 2).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    return torch.cat((x[..., :-width], turned), -1)


def test_norms(truth: HFOracle, wires: Mapping[str, Tensor]) -> None:
    for name, key, wire in (
        ("layers.0.attn_norm", "x", "layers.0.attn_hc.collapsed"),
        ("layers.1.kv_norm", "kv", "layers.1.kv.kv"),
        ("final_norm", "x", "hc_head.collapsed"),
    ):
        close(run(truth, name, wires)[key], norm(wires[wire].double(), leaf(truth, name)["weight"]))
    close(run(truth, "layers.0.q_b_norm", wires)["q"], norm(wires["layers.0.q_b.q"].double(), 1.0))


def test_linears(truth: HFOracle, wires: Mapping[str, Tensor]) -> None:
    x = wires["layers.0.attn_norm.x"].double()
    weight = leaf(truth, "layers.0.q_a")["weight"]
    close(run(truth, "layers.0.q_a", wires)["q_a"], torch.einsum("bsd,rd->bsr", x, weight))
    out = wires["layers.0.attn_unrope.out"].double()  # [B, S, H, D]; two heads a group
    grouped = leaf(truth, "layers.0.o_a")["weight"].view(2, 16, 128)
    expected = torch.einsum("bsgi,goi->bsgo", out.reshape(2, LENGTH, 2, 128), grouped)
    close(run(truth, "layers.0.o_a", wires)["o_a"], expected)


def test_rope(truth: HFOracle, wires: Mapping[str, Tensor]) -> None:
    config = stage(truth, "rope_cache").config
    for name in ("main", "compress"):
        frequency = config[f"inv_freq_{name}"]
        assert isinstance(frequency, Tensor)
        tables = run(truth, "rope_cache", {"case.positions": torch.tensor([[0, 1, 77, 1_000_003]])})
        for i, position in enumerate((0, 1, 77, 1_000_003)):
            for j, f in enumerate(frequency.tolist()):
                assert tables[f"{name}_cos"][0, i, j].item() == pytest.approx(math.cos(position * f), abs=1e-15)
                assert tables[f"{name}_sin"][0, i, j].item() == pytest.approx(math.sin(position * f), abs=1e-15)
    exact = run(truth, "rope_cache", wires)
    given = {**wires, **{f"rope_cache.{k}": v for k, v in exact.items()}}
    for layer, name in ((0, "main"), (1, "compress")):
        frequency = config[f"inv_freq_{name}"]
        assert isinstance(frequency, Tensor)
        angle = torch.arange(LENGTH, dtype=torch.float64)[:, None] * frequency
        q, kv, out = (wires[f"layers.{layer}.{w}"].double() for w in ("q_b_norm.q", "kv_norm.kv", "attn_core.out"))
        close(run(truth, f"layers.{layer}.q_rope", given)["q"], turn(q, angle[:, None]))
        close(run(truth, f"layers.{layer}.kv_rope", given)["kv"], turn(kv, angle))
        close(run(truth, f"layers.{layer}.attn_unrope", given)["out"], turn(out, -angle[:, None]))


def test_hyper_connection(truth: HFOracle, wires: Mapping[str, Tensor]) -> None:
    p = leaf(truth, "layers.1.ffn_hc")
    streams = wires["layers.1.attn_mix.streams"].double()
    logits = norm(streams.reshape(2, LENGTH, -1), 1.0) @ p["fn"].T
    scale = p["scale"].repeat_interleave(torch.tensor([4, 4, 16]))
    pre, post, comb = (logits * scale + p["base"]).split([4, 4, 16], -1)
    got = run(truth, "layers.1.ffn_hc", wires)
    close(got["pre"], 1 / (1 + torch.exp(-pre)) + 1e-6)
    close(got["post"], 2 / (1 + torch.exp(-post)))
    matrix = torch.exp(comb.view(2, LENGTH, 4, 4))
    matrix = matrix / matrix.sum(-1, keepdim=True) + 1e-6
    for step in range(39):  # columns first and last: twenty of them, nineteen rows between
        matrix = matrix / (matrix.sum(-2 if step % 2 == 0 else -1, keepdim=True) + 1e-6)
    close(got["comb"], matrix)
    close(got["collapsed"], torch.einsum("bsn,bsnd->bsd", got["pre"], streams))
    mixed = run(truth, "layers.1.ffn_mix", wires)["streams"]
    expected = torch.einsum("bsnm,bsnd->bsmd", wires["layers.1.ffn_hc.comb"].double(), streams)
    expected += wires["layers.1.ffn_hc.post"].double()[..., None] * wires["layers.1.moe_sum.out"].double()[:, :, None]
    close(mixed, expected)


def test_hyper_head(truth: HFOracle, wires: Mapping[str, Tensor]) -> None:
    p = leaf(truth, "hc_head")
    streams = wires["layers.3.ffn_mix.streams"].double()
    logits = norm(streams.reshape(2, LENGTH, -1), 1.0) @ p["fn"].T * p["scale"] + p["base"]
    got = run(truth, "hc_head", wires)
    close(got["pre"], 1 / (1 + torch.exp(-logits)) + 1e-6)
    close(got["collapsed"], torch.einsum("bsn,bsnd->bsd", got["pre"], streams))


def pooled(x: Tensor, p: Mapping[str, Tensor], rate: int, overlap: bool) -> Tensor:
    """Softmax over the window of each channel; with overlap also over the window before, in its own channels."""
    head = p["kv_norm.weight"].shape[0]
    kv, gate = x @ p["kv_proj.weight"].T, x @ p["gate_proj.weight"].T
    entries = []
    for w in range(x.shape[1] // rate):
        now = slice(w * rate, (w + 1) * rate)
        values, logits = [kv[:, now, -head:]], [(gate[:, now] + p["position_bias"])[..., -head:]]
        if overlap and w:
            before = slice((w - 1) * rate, w * rate)
            values.append(kv[:, before, :head])
            logits.append((gate[:, before] + p["position_bias"])[..., :head])
        weight = torch.exp(torch.cat(logits, 1))
        entries.append((weight * torch.cat(values, 1)).sum(1) / weight.sum(1))
    return torch.stack(entries, 1)


@pytest.mark.parametrize(("layer", "rate"), [(1, 4), (2, 128)])
def test_compressor(truth: HFOracle, wires: Mapping[str, Tensor], layer: int, rate: int) -> None:
    name = f"layers.{layer}.compressor"
    p = leaf(truth, name)
    expected = pooled(wires[f"layers.{layer}.attn_norm.x"].double(), p, rate, overlap=rate == 4)
    got = run(truth, name, wires)
    close(got["pooled"], expected)
    frequency = stage(truth, name).config["inv_freq_compress"]
    assert isinstance(frequency, Tensor)
    angle = torch.arange(0, LENGTH - rate + 1, rate, dtype=torch.float64)[:, None] * frequency
    close(got["keys"], turn(norm(expected, p["kv_norm.weight"]), angle))


def test_indexer(truth: HFOracle, wires: Mapping[str, Tensor]) -> None:
    p = leaf(truth, "layers.1.indexer")
    frequency = stage(truth, "layers.1.indexer").config["inv_freq_compress"]
    assert isinstance(frequency, Tensor)
    x = wires["layers.1.attn_norm.x"].double()
    positions = torch.arange(LENGTH, dtype=torch.float64)
    keys = norm(pooled(x, p, 4, overlap=True), p["kv_norm.weight"])
    keys = turn(keys, positions[: LENGTH - 3 : 4, None] * frequency)
    q = (wires["layers.1.q_a_norm.q_residual"].double() @ p["q_b_proj.weight"].T).view(2, LENGTH, 32, 32)
    q = turn(q, positions[:, None, None] * frequency)
    weight = x @ p["weights_proj.weight"].T / math.sqrt(32)
    scores = torch.einsum("bsh,bsht->bst", weight, torch.einsum("bshd,btd->bsht", q, keys).clamp(min=0) / math.sqrt(32))
    got = run(truth, "layers.1.indexer", wires)
    close(got["keys"], keys)
    eligible = torch.isfinite(got["scores"])
    close(got["scores"][eligible], scores[eligible])
    assert torch.equal(eligible[0], (torch.arange(LENGTH)[:, None] + 1) // 4 > torch.arange(33))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_attention(truth: HFOracle, wires: Mapping[str, Tensor], layer: int) -> None:
    here = f"layers.{layer}"
    q, keys = wires[f"{here}.q_rope.q"].double(), wires[f"{here}.kv_rope.kv"].double()
    if layer:
        keys = torch.cat((keys, wires[f"{here}.compressor.keys"].double()), 1)
    sinks = leaf(truth, f"{here}.attn_core")["sinks"]
    got = run(truth, f"{here}.attn_core", wires)
    visible = wires[f"{here}.attn_core.visible"]
    assert torch.equal(got["visible"], visible)
    logits = torch.einsum("bshd,bjd->bshj", q, keys) / 8
    for row, query in ((0, 0), (1, 5), (0, 64), (1, LENGTH - 1)):
        seen = visible[row, query]
        each = logits[row, query, :, seen]  # [H, visible]
        weight = torch.exp(each)
        total = weight.sum(-1) + torch.exp(sinks)
        at = (row, query)
        close(got["out"][at], (weight @ keys[row, seen]) / total[:, None])
        close(got["lse"][at], torch.log(total))
        close(got["sink_mass"][at], torch.exp(sinks) / total)
        share = weight / weight.sum(-1, keepdim=True)
        entropy = -(share * torch.log(share)).sum(-1)
        assert float((got["entropy"][at] - entropy).abs().max()) < 1e-12


@pytest.mark.parametrize("layer", [0, 1])
def test_router(truth: HFOracle, wires: Mapping[str, Tensor], layer: int) -> None:
    name = f"layers.{layer}.router"
    p, x = leaf(truth, name), wires[f"layers.{layer}.ffn_norm.x"].double()
    scores = torch.sqrt(torch.log1p(torch.exp(x @ p["weight"].T)))
    got = run(truth, name, wires)
    close(got["logits"], x @ p["weight"].T)
    picks = got["picks"]
    if layer == 0:
        assert torch.equal(picks, p["tid2eid"][wires["case.input_ids"]])
    else:
        best = (scores + p["e_score_correction_bias"]).argsort(-1, descending=True)[..., :2]
        assert torch.equal(picks.sort(-1).values, best.sort(-1).values)
    chosen = scores.gather(-1, picks)
    close(got["weights"], 1.5 * chosen / chosen.sum(-1, keepdim=True))
    given = picks.flip(-1)
    replayed = run(truth, name, wires, replay={"picks": given})
    close(replayed["weights"], 1.5 * chosen.flip(-1) / chosen.sum(-1, keepdim=True))


def test_experts(truth: HFOracle, wires: Mapping[str, Tensor]) -> None:
    p = leaf(truth, "layers.1.experts")
    x, picks = wires["layers.1.ffn_norm.x"].double(), wires["layers.1.router.picks"]
    gate, up = (torch.einsum("bsd,bskfd->bskf", x, p[f"{n}_proj.weight"][picks]) for n in ("gate", "up"))
    act = silu(gate.clamp(max=2.0)) * up.clamp(-2.0, 2.0)
    down = torch.einsum("bskf,bskdf->bskd", act, p["down_proj.weight"][picks])
    out = (down * wires["layers.1.router.weights"].double()[..., None]).sum(2)
    got = run(truth, "layers.1.experts", wires)
    assert bool((gate > 2).any())  # the clamp matters here
    for name, value in (("gate", gate), ("up", up), ("act", act), ("down", down), ("out", out)):
        close(got[name], value)


def test_shared_expert_and_sum(truth: HFOracle, wires: Mapping[str, Tensor]) -> None:
    p, x = leaf(truth, "layers.1.shared_expert"), wires["layers.1.ffn_norm.x"].double()
    act = silu((x @ p["gate_proj.weight"].T).clamp(max=2.0)) * (x @ p["up_proj.weight"].T).clamp(-2.0, 2.0)
    got = run(truth, "layers.1.shared_expert", wires)
    close(got["act"], act)
    close(got["out"], act @ p["down_proj.weight"].T)
    total = wires["layers.1.experts.out"].double() + wires["layers.1.shared_expert.out"].double()
    close(run(truth, "layers.1.moe_sum", wires)["out"], total)


def test_free_run(truth: HFOracle, wires: Mapping[str, Tensor], single: build.HFReference) -> None:
    """Chained in float64 with the picks of a float32 run, every wire is within float32's reach of it."""
    from tests.reference.conftest import compose

    case = {w.removeprefix("case."): v for w, v in wires.items() if w.startswith("case.")}
    near, free = compose(single, case), {f"case.{name}": value for name, value in case.items()}
    for s in truth.stages:
        picks = {"picks": near[f"{s.name}.picks"]} if any(port.name == "picks" for port in s.outputs) else None
        outputs = s.run(replay=picks, **arguments(s, free))
        free |= {port.wire: outputs[port.name] for port in s.outputs}
    for wire, value in free.items():
        if value.dtype is torch.float64:
            finite = torch.isfinite(value)
            assert float((value - near[wire])[finite].abs().max()) < 1e-4 * max(1.0, float(value[finite].abs().max()))
        else:
            assert torch.equal(value, near[wire]), wire


def test_nothing_narrow_takes_part(truth: HFOracle, wires: Mapping[str, Tensor]) -> None:
    """The dispatch check ran in all the tests above; here it fires, for a weight and for a cast of each kind."""
    s = stage(truth, "layers.0.q_a")
    module = s.inner.module  # type: ignore[attr-defined]
    exact = module.weight
    module.weight = torch.nn.Parameter(exact.float(), requires_grad=False)
    try:
        with pytest.raises(InvalidRun, match=r"the float64 oracle met float32 \[32, 64\] in aten"):
            s.run(**arguments(s, wires))
    finally:
        module.weight = exact
    for dtype in lift.NARROW:
        with pytest.raises(InvalidRun, match="aten"), lift.NothingNarrow():  # type: ignore[no-untyped-call]
            torch.ones(2, dtype=torch.float64).to(dtype)


def test_lift() -> None:
    x = torch.ones(2, dtype=torch.float64)
    with lift.float64():
        made = [
            x.float(),
            x.half(),
            x.bfloat16(),
            x.to(torch.float32),
            x.to(dtype=torch.bfloat16),
            torch.softmax(x, 0, dtype=torch.float32),
            x.softmax(0, torch.float32),
            torch.zeros(2, dtype=torch.float16),
            x.type(torch.float32),
            x.sum(dtype=torch.float32),
        ]
        kept = [x.long(), x > 0, x.to(torch.int32)]
    assert {value.dtype for value in made} == {torch.float64}
    assert [value.dtype for value in kept] == [torch.int64, torch.bool, torch.int32]
    with pytest.raises(InvalidRun), lift.float64():
        torch.zeros(2)  # no dtype named: the default one is narrow


def test_long_positions(truth: HFOracle) -> None:
    """Angles are float64 products: at a million positions float32 is off by a hundredth of a radian."""
    tables = run(truth, "rope_cache", {"case.positions": torch.tensor([[1_048_575]])})
    frequency = stage(truth, "rope_cache").config["inv_freq_main"]
    assert isinstance(frequency, Tensor)
    assert tables["main_cos"][0, 0, 1].item() == pytest.approx(math.cos(1_048_575 * frequency[1].item()), abs=1e-12)


def test_judge(truth: HFOracle, native: build.HFReference, wires: Mapping[str, Tensor]) -> None:
    """Every output of every stage: float64, of its shape, spreads that are finite and in order."""
    for s in native.stages:
        given = {"picks": wires[f"{s.name}.picks"]} if any(port.name == "picks" for port in s.outputs) else None
        judged = truth.judge(s.name, arguments(s, wires), plan=s.plan, given=given)
        assert list(judged) == [port.name for port in s.outputs]
        for port in s.outputs:
            value, rss, total = judged[port.name]
            assert value.dtype is rss.dtype is total.dtype is torch.float64
            assert value.shape == rss.shape == total.shape
            if port.role != "picks":
                assert value.shape == wires[port.wire].shape
            assert bool(torch.isfinite(rss).all())
            assert bool((rss >= 0).all())
            assert bool((rss <= total * (1 + 1e-9)).all()), port.wire
            if port.role == "exact":
                assert torch.equal(value, wires[port.wire].double())
                assert not total.any()


def test_judged_picks_are_scores(truth: HFOracle, wires: Mapping[str, Tensor]) -> None:
    node = stage(truth, "layers.1.router")
    inputs = arguments(node, wires)
    free = truth.judge(node.name, inputs, plan={})
    scores = torch.sqrt(torch.log1p(torch.exp(free["logits"].value))) + node.params["e_score_correction_bias"]
    close(free["picks"].value, scores)
    other = wires["layers.1.router.picks"].flip(-1)
    given = truth.judge(node.name, inputs, plan={}, given={"picks": other})
    assert torch.equal(given["picks"].value, free["picks"].value)
    assert not torch.equal(given["weights"].value, free["weights"].value)
    node = stage(truth, "layers.1.indexer")
    judged = truth.judge(node.name, arguments(node, wires), plan={})
    assert torch.equal(judged["picks"].value, judged["scores"].value)
    assert bool(torch.isneginf(judged["picks"].value[:, 0]).all())


def test_unknown_stage(truth: HFOracle) -> None:
    with pytest.raises(UsageError, match="expected a stage of this checkpoint"):
        truth.judge("layers.9.q_a", {}, plan={})


def test_ids_that_come_back_as_numbers(truth: HFOracle, wires: Mapping[str, Tensor]) -> None:
    node = stage(truth, "layers.1.experts")
    inputs = arguments(node, wires)
    raised = node.run(**{**inputs, "picks": inputs["picks"].double()})
    assert torch.equal(raised["out"], node.run(**inputs)["out"])


def test_overrides_stay_float64(truth: HFOracle, wires: Mapping[str, Tensor]) -> None:
    node = stage(truth, "layers.0.q_a")
    weight = node.params["weight"] * (1 + 2.0**-40)
    moved = node.run(params={"weight": weight}, **arguments(node, wires))["q_a"]
    close(moved, wires["layers.0.attn_norm.x"].double() @ weight.T)
    assert not torch.equal(moved, node.run(**arguments(node, wires))["q_a"])
