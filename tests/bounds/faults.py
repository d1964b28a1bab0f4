"""What a margin catches: known faults put into a clean emulation, and the share of places where they show.

Every fault returns (share caught, worst ratio): the share of instances (tokens, heads, outputs: as said) with at least
one element above its bound, and the largest error over bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from reference.bounds import spread
from tests.bounds.emulate import Arithmetic, run
from tests.bounds.margin import bound
from tests.bounds.plans import output_dtype, plan
from tests.bounds.scenes import HID, H, N, Scene, scene

Change = Callable[[Scene], Scene]


def judge(
    clean: Scene, faulty: Scene, output: str, which: str, change: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """error / bound of a production that runs `faulty` where the oracle runs `clean`."""
    points = plan(clean.kind, which)
    oracle = run(clean.kind, Arithmetic(), clean.config, clean.params, clean.inputs)
    got = run(clean.kind, Arithmetic(points, torch.float32), faulty.config, faulty.params, faulty.inputs)[output]
    dtype = output_dtype(clean.kind, output, points)
    if change is not None:
        got = change(got)
    got = got.to(torch.bfloat16 if dtype == "bf16" else torch.float32).double()
    found = spread(clean, clean.inputs, oracle, points)
    return (got - oracle[output]).abs() / bound(oracle[output], *found[output], dtype)


def shares(ratio: Tensor, *keep: int) -> tuple[float, float]:
    """(share of instances along the kept axes with an element above 1, worst ratio)."""
    lost = [axis for axis in range(ratio.ndim) if axis not in keep]
    worst = ratio.amax(lost) if lost else ratio
    return float((worst > 1).double().mean()), float(worst.max())


def _width(which: str) -> str:
    return "fp32" if which == "fp32" else "bf16"


def comb_transposed(which: str) -> tuple[float, float]:
    """Seen in `comb`, by token."""
    s = scene("hyper", "normal", 64, 0, _width(which))
    return shares(judge(s, s, "comb", which, lambda t: t.mT), 0, 1)


def comb_transposed_in_mix(which: str) -> tuple[float, float]:
    """Seen in the mixed streams, by token; the streams are distinct."""
    s = scene("mix", "normal", 64, 0, _width(which))
    return shares(judge(s, replace(s, inputs={**s.inputs, "comb": s.inputs["comb"].mT}), "streams", which), 0, 1)


def comb_transposed_equal_streams(which: str) -> tuple[float, float]:
    """The same with N equal streams (layer 0): rows and columns of comb sum to nearly one, so little shows."""
    s = scene("mix", "normal", 64, 0, _width(which))
    s = replace(s, inputs={**s.inputs, "streams": s.inputs["streams"][:, :, :1].expand(-1, -1, N, -1)})
    return shares(judge(s, replace(s, inputs={**s.inputs, "comb": s.inputs["comb"].mT}), "streams", which), 0, 1)


def _wide_comb(sigma: float, which: str) -> Scene:
    """Comb logits of standard deviation `sigma` over tokens and entries."""
    s = scene("hyper", "normal", 256, 0, _width(which))
    base, scale = s.params["base"].clone(), s.params["scale"].clone()
    base[2 * N :] = base[2 * N :] / base[2 * N :].std() * sigma / 2**0.5
    z = run("attn_hc", Arithmetic(), s.config, {**s.params, "base": base * 0}, s.inputs)["post"] / 2
    scale[2] = scale[1] / torch.logit(z).std() * sigma / 2**0.5
    return replace(s, params={**s.params, "base": base.float().double(), "scale": scale.float().double()})


def sinkhorn_19(which: str) -> tuple[float, float]:
    """One iteration fewer, comb logits of sigma 2; by token."""
    s = _wide_comb(2.0, which)
    return shares(judge(s, replace(s, config={**s.config, "hc_sinkhorn_iters": 19}), "comb", which), 0, 1)


def no_pre_eps(which: str) -> tuple[float, float]:
    """pre without eps where its logit is -10 or below; by such element."""
    s = scene("hyper", "tails", 64, 0, _width(which))
    ratio = judge(s, s, "pre", which, lambda t: t - 1e-6)
    pre = run("attn_hc", Arithmetic(), s.config, s.params, s.inputs)["pre"]
    return shares(ratio[pre < torch.sigmoid(torch.tensor(-10.0)) + 1e-6], 0)


def sink_bf16(output: str) -> Callable[[str], tuple[float, float]]:
    """Sinks rounded to bf16, sinks spread over -2 to 3; by (query, head)."""

    def fault(which: str) -> tuple[float, float]:
        s = scene("attention", "normal", 64, 0, _width(which))
        sinks = torch.linspace(-2.0, 3.0, 16 * H)[torch.randperm(16 * H, generator=torch.Generator().manual_seed(0))]
        found = []
        for part in sinks.chunk(16):
            part = (part + 0.0123).double()
            clean = replace(s, params={"sinks": part})
            wrong = replace(s, params={"sinks": part.to(torch.bfloat16).double()})
            found.append(judge(clean, wrong, output, which))
        ratio = torch.cat(found, 2)
        return shares(ratio, 0, 1, 2)

    return fault


def table_bf16(which: str) -> tuple[float, float]:
    """A cos/sin table rounded to bf16 under a plan that says fp32; by position."""
    s = scene("rope_cache", "normal", 64, 0, _width(which))
    return shares(judge(s, s, "main_cos", which, lambda t: t.to(torch.bfloat16)), 0, 1)


def mscale(which: str) -> tuple[float, float]:
    """YaRN's amplitude 0.1 ln(16) + 1 on the compress table; by position."""
    s = scene("rope_cache", "normal", 64, 0, _width(which))
    return shares(judge(s, s, "compress_cos", which, lambda t: t * 1.2772588722239782), 0, 1)


def _codes(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """E2M1 codes, E4M3 block scales and an fp32 scale that is no bf16 number, for a [96, HID] weight."""
    g = torch.Generator().manual_seed(seed)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    code = values[torch.randint(0, 8, (96, HID), generator=g)] * torch.randn(96, HID, generator=g).sign()
    block = (40 * (1 + torch.randn(96, HID // 16, generator=g).abs())).to(torch.float8_e4m3fn)
    return code, block, torch.tensor(2.3e-4 * 1.1, dtype=torch.float32).double()


def _weight(code: Tensor, block: Tensor, scale_2: Tensor) -> Tensor:
    return code * block.double().repeat_interleave(16, -1) * scale_2


def _wrong_weight(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[str], tuple[float, float]]:
    """A linear whose weight is decoded wrongly; by output row that the fault touches."""

    def fault(which: str) -> tuple[float, float]:
        parts = _codes(0)
        right, wrong = _weight(*parts), change(*parts)
        s = replace(scene("linear", "normal", 64, 0, _width(which)), params={"weight": right})
        touched = (right != wrong).any(-1)
        ratio = judge(s, replace(s, params={"weight": wrong}), "y", which)[..., touched]
        return shares(ratio, 2)

    return fault


def _one_ulp(block: Tensor, share: float) -> Tensor:
    hit = torch.rand(block.shape, generator=torch.Generator().manual_seed(7)) < share
    return torch.where(hit, block.view(torch.uint8) + 1, block.view(torch.uint8)).view(torch.float8_e4m3fn)


def _one_block(block: Tensor) -> Tensor:
    moved = block.view(torch.uint8).clone()
    moved[11, 3] += 1
    return moved.view(torch.float8_e4m3fn)


def _one_nibble(code: Tensor) -> Tensor:
    moved = code.clone()
    moved[11, 50] = {0.0: 0.5, 0.5: 1.0, 1.0: 1.5, 1.5: 2.0, 2.0: 3.0, 3.0: 4.0, 4.0: 6.0, 6.0: 4.0}[
        float(code[11, 50].abs())
    ]
    return moved


def tf32(which: str) -> tuple[float, float]:
    """A linear on operands cut to TF32's 11 bits; by output row. Not allowed under any plan."""
    s = scene("linear", "normal", 64, 0, _width(which))

    def cut(t: Tensor) -> Tensor:
        m, e = torch.frexp(t)
        return torch.ldexp((m * 2048).round() / 2048, e)

    moved = replace(s, params={"weight": cut(s.params["weight"])}, inputs={"x": cut(s.inputs["x"])})
    return shares(judge(s, moved, "y", which), 2)


def expert_scale_bf16(which: str) -> tuple[float, float]:
    """weight_scale_2 of the shared expert's down projection in bf16 (as a factor on the result); by token."""
    s = scene("shared", "normal", 64, 0, _width(which))
    factor = float(torch.tensor(2.53e-4).to(torch.bfloat16).double() / 2.53e-4)
    moved = replace(s, params={**s.params, "down_proj.weight": s.params["down_proj.weight"] * factor})
    return shares(judge(s, moved, "out", which), 0, 1)


FAULTS: dict[str, tuple[Callable[[str], tuple[float, float]], str]] = {
    "comb transposed, in comb": (comb_transposed, "token"),
    "comb transposed, in the mix": (comb_transposed_in_mix, "token"),
    "comb transposed, in the mix of equal streams": (comb_transposed_equal_streams, "token"),
    "19 Sinkhorn iterations, comb logits sigma 2": (sinkhorn_19, "token"),
    "no eps on pre, logit <= -10": (no_pre_eps, "element"),
    "sink in bf16, in lse": (sink_bf16("lse"), "query and head"),
    "sink in bf16, in out": (sink_bf16("out"), "query and head"),
    "cos/sin table in bf16": (table_bf16, "position"),
    "YaRN mscale on the table": (mscale, "position"),
    "1 % of block scales one ulp off": (_wrong_weight(lambda c, b, s: _weight(c, _one_ulp(b, 0.01), s)), "touched row"),
    "one block scale one ulp off": (_wrong_weight(lambda c, b, s: _weight(c, _one_block(b), s)), "touched row"),
    "one nibble off by one": (_wrong_weight(lambda c, b, s: _weight(_one_nibble(c), b, s)), "touched row"),
    "weight_scale_2 in bf16": (
        _wrong_weight(lambda c, b, s: _weight(c, b, s.to(torch.bfloat16).double())),
        "touched row",
    ),
    "weight_scale_2 in bf16, shared down": (expert_scale_bf16, "token"),
    "TF32 operands": (tf32, "output row"),
}
