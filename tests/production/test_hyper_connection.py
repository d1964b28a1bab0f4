"""mHC and the hyper-head against float64 loops: order, orientation, every eps, direct mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from production.build import Model
from production.hyper_connection import paper_names, sinkhorn
from tests.production.check import V, assert_rounded, run

N, D, EPS = 4, 64, 1e-6


def sinkhorn64(logits: Tensor, iterations: int) -> Tensor:
    """One matrix, entry by entry."""
    z = logits.double()
    comb = [[float((z[n] - z[n].logsumexp(0)).exp()[m]) + EPS for m in range(N)] for n in range(N)]
    for step in range(2 * iterations - 1):
        if step % 2 == 0:  # columns first
            sums = [sum(comb[n][m] for n in range(N)) + EPS for m in range(N)]
            comb = [[comb[n][m] / sums[m] for m in range(N)] for n in range(N)]
        else:
            sums = [sum(row) + EPS for row in comb]
            comb = [[comb[n][m] / sums[n] for m in range(N)] for n in range(N)]
    return torch.tensor(comb, dtype=torch.float64)


def coefficients64(params: dict[str, Tensor], streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """pre, post, comb of one token."""
    x = streams.double().flatten()
    x = x / (x.square().mean() + 1e-6).sqrt()
    z = params["fn"] @ x
    scale, base = params["scale"], params["base"]
    pre = torch.sigmoid(z[:N] * scale[0] + base[:N]) + EPS
    post = 2 * torch.sigmoid(z[N : 2 * N] * scale[1] + base[N : 2 * N])
    comb = sinkhorn64((z[2 * N :] * scale[2] + base[2 * N :]).view(N, N), 20)
    return pre, post, comb


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_coefficients_and_collapse(native: Model, scale: float) -> None:
    stage = native.stage("layers.1.attn_hc")
    streams = (torch.randn(2, 3, N, D) * scale).bfloat16()
    got, params = run(stage, streams=streams), stage.decoded()
    for b in range(2):
        for s in range(3):
            pre, post, comb = coefficients64(params, streams[b, s])
            assert torch.allclose(got["pre"][b, s].double(), pre, rtol=3e-6, atol=1e-9)
            assert torch.allclose(got["post"][b, s].double(), post, rtol=3e-6, atol=1e-9)
            assert torch.allclose(got["comb"][b, s].double(), comb, rtol=3e-5, atol=1e-9)
            terms = got["pre"][b, s].double().unsqueeze(-1) * streams[b, s].double()
            assert_rounded(got["collapsed"][b, s], terms.sum(0), 8 * V * terms.abs().sum(0))


def test_pre_keeps_its_eps_where_the_sigmoid_vanishes(native: Model) -> None:
    stage = native.stage("layers.0.ffn_hc")
    base = stage.params["base"].clone()
    base[:N] = -60.0
    out = stage.run(params={"base": base}, streams=torch.randn(1, 2, N, D).bfloat16())
    assert torch.allclose(out["pre"], torch.full((1, 2, N), EPS), rtol=1e-5)
    base[N : 2 * N] = -60.0
    out = stage.run(params={"base": base}, streams=torch.randn(1, 2, N, D).bfloat16())
    assert out["post"].max() < 1e-12  # post has none


def test_rows_of_fn_come_as_pre_post_comb() -> None:
    fn, base, scale = torch.arange(24.0).unsqueeze(1), torch.arange(24.0), torch.tensor([1.0, 2.0, 3.0])
    m = paper_names(fn, base, scale, N)
    assert (m.W_pre[0], m.W_post[0], m.W_comb[0]) == (0, 4, 8)
    assert (m.S_pre[-1], m.S_post[-1], m.S_comb[-1]) == (3, 7, 23)
    assert (m.alpha_pre, m.alpha_post, m.alpha_comb) == (1, 2, 3)


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_order_and_iterations(iterations: int) -> None:
    """Sharp logits: the last iterations still move the matrix, and which sums are one tells the last step."""
    logits = torch.randn(6, N, N) * 4
    comb = sinkhorn(logits, iterations, EPS)
    for one, z in zip(comb, logits, strict=True):
        assert torch.allclose(one.double(), sinkhorn64(z, iterations), rtol=1e-4, atol=1e-9)
    columns, rows = (comb.sum(-2) - 1).abs().max(), (comb.sum(-1) - 1).abs().max()
    assert columns < (1e-3 if iterations == 1 else 1e-5)  # eps over the smallest sum
    assert rows > 10 * columns


def test_softmax_runs_over_rows() -> None:
    """Two rows that differ by a constant are equal after a row softmax, not after a column softmax."""
    logits = torch.randn(N, N)
    logits[1] = logits[0] + 3
    comb = sinkhorn(logits, 1, 0.0)
    assert torch.allclose(comb[0], comb[1])


def test_mix_contracts_the_first_stream_axis(native: Model) -> None:
    stage = native.stage("layers.2.ffn_mix")
    streams, out = torch.randn(2, 3, N, D).bfloat16(), torch.randn(2, 3, D).bfloat16()
    post, comb = torch.rand(2, 3, N) * 2, torch.rand(2, 3, N, N)
    got = run(stage, streams=streams, post=post, comb=comb, out=out)["streams"]
    for m in range(N):
        exact = post[..., m, None].double() * out.double()
        size = exact.abs()
        for n in range(N):
            term = comb[..., n, m, None].double() * streams[..., n, :].double()
            exact, size = exact + term, size + term.abs()
        assert_rounded(got[..., m, :], exact, 8 * V * size)


def test_identical_streams_pass_a_column_stochastic_comb_unchanged(native: Model) -> None:
    stage = native.stage("layers.2.attn_mix")
    row = torch.randn(1, 2, 1, D).bfloat16()
    comb = sinkhorn(torch.randn(1, 2, N, N) * 3, 20, EPS)
    zero = torch.zeros(1, 2, D).bfloat16()
    got = stage.run(streams=row.expand(-1, -1, N, -1), post=torch.rand(1, 2, N), comb=comb, out=zero)["streams"]
    assert torch.allclose(got.float(), row.float().expand_as(got), rtol=2**-8)


def test_direct_mode(native: Model) -> None:
    hc, mix = native.stage("layers.2.attn_hc"), native.stage("layers.2.attn_mix")
    assert (hc.direct_with, mix.direct_with) == (mix.name, hc.name)  # type: ignore[attr-defined]
    streams, out = torch.randn(1, 5, N, D).bfloat16(), torch.randn(1, 5, D).bfloat16()
    collapsed = hc.direct(streams=streams)["collapsed"]  # type: ignore[attr-defined]
    assert_rounded(collapsed, streams.double().mean(2), 8 * V * streams.double().abs().sum(2))
    added = mix.direct(streams=streams, out=out)["streams"]  # type: ignore[attr-defined]
    exact = streams.double() + 0.1 * out.double().unsqueeze(2)
    assert_rounded(added, exact, 8 * V * (streams.double().abs() + out.double().abs().unsqueeze(2)))
    with_rest = mix.direct(streams=streams, out=out, post=torch.rand(1, 5, N))["streams"]  # type: ignore[attr-defined]
    assert torch.equal(with_rest, added)


def test_hyper_head(native: Model) -> None:
    stage = native.stage("hc_head")
    streams = torch.randn(2, 3, N, D).bfloat16()
    got, params = run(stage, streams=streams), stage.decoded()
    x = streams.double().flatten(2)
    x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    pre = torch.sigmoid(x @ params["fn"].T * params["scale"] + params["base"]) + EPS
    assert torch.allclose(got["pre"].double(), pre, rtol=3e-6)
    terms = got["pre"].double().unsqueeze(-1) * streams.double()
    assert_rounded(got["collapsed"], terms.sum(2), 8 * V * terms.abs().sum(2))
    low = stage.run(params={"base": torch.full_like(stage.params["base"], -60)}, streams=streams)["pre"]
    assert torch.allclose(low, torch.full_like(low, EPS), rtol=1e-4)
