"""The lightning indexer against float64 loops: ReLU, head weights, causality, ties, picks."""

from __future__ import annotations

import pytest
import torch

from production.build import Model
from production.indexer import choose, ready_entries, relu_scores
from production.rope import frequencies
from tests.production.check import run

HI, DI, RATE, TOPK = 16, 32, 4, 5


@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 30, 41])
def test_scores_and_picks_against_loops(native: Model, length: int) -> None:
    stage = native.stage("layers.1.indexer")
    x, residual = torch.randn(2, length, 64).bfloat16(), torch.randn(2, length, 32).bfloat16()
    got = run(stage, x=x, q_residual=residual, positions=torch.arange(length).expand(2, -1))
    entries, p = length // RATE, stage.decoded()
    assert got["picks"].shape == (2, length, min(TOPK, entries))
    freq = frequencies(native.config.compress_rope, torch.device("cpu"))
    for b in range(2):
        for t in range(length):
            q = (p["q_b_proj.weight"] @ residual[b, t].double()).view(HI, DI)
            turned = torch.view_as_complex(q[:, -16:].reshape(HI, 8, 2).contiguous()) * torch.polar(
                torch.ones(8, dtype=torch.float64), t * freq
            )
            q = torch.cat((q[:, :-16], torch.view_as_real(turned).flatten(1)), dim=1).bfloat16().double()
            weight = p["weights_proj.weight"] @ x[b, t].double() / HI**0.5
            scores = {
                e: float((weight * (q @ got["keys"][b, e].double()).clamp(min=0)).sum()) / DI**0.5
                for e in range(entries)
                if (e + 1) * RATE <= t + 1
            }
            row = got["scores"][b, t]
            assert row[len(scores) :].eq(-torch.inf).all()
            for e, score in scores.items():
                assert row[e].item() == pytest.approx(score, rel=2e-2, abs=2e-3)  # a flipped rounding of q
            best = sorted(range(len(scores)), key=lambda e: (-row[e].item(), e))[:TOPK]
            picks = got["picks"][b, t].tolist()
            assert picks == best + [-1] * (len(picks) - len(best))


def test_relu_is_inside_the_head_sum() -> None:
    """Two heads of opposite sign: without the ReLU they would cancel."""
    q = torch.tensor([1.0, -1.0]).view(1, 1, 2, 1)
    scores = relu_scores(q, torch.ones(1, 1, 1), torch.tensor([[[3.0, 5.0]]]))
    assert scores.item() == 3.0


def test_ties_go_to_the_lower_index_and_absent_is_minus_one() -> None:
    inf = torch.inf
    scores = torch.tensor([[[0.0, 1.0, 0.0, 1.0, 0.0, -inf], [-inf] * 6, [-1.0, -0.0, 0.0, -inf, -inf, -inf]]])
    assert choose(scores, 4).tolist() == [[[1, 3, 0, 2], [-1] * 4, [1, 2, 0, -1]]]
    assert choose(torch.zeros(1, 2, 300), 5).tolist() == [[[0, 1, 2, 3, 4]] * 2]


def test_an_entry_is_ready_when_its_window_is_complete() -> None:
    ready = ready_entries(torch.arange(9).unsqueeze(0), 4, 3)
    assert ready[0].sum(-1).tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert ready[0, 3].tolist() == [True, False, False]


def test_selection_ranks_visible_entries_only(native: Model) -> None:
    """Every query has as many picks as it can: ranking before masking would lose some."""
    stage = native.stage("layers.3.indexer")
    x, residual = torch.randn(1, 120, 64).bfloat16(), torch.randn(1, 120, 32).bfloat16()
    picks = stage.run(x=x, q_residual=residual, positions=torch.arange(120).unsqueeze(0))["picks"]
    count = (picks >= 0).sum(-1)[0]
    assert count.tolist() == [min(TOPK, (t + 1) // RATE) for t in range(120)]
    assert (picks[0] < ((torch.arange(120) + 1) // RATE).unsqueeze(-1)).all()


def test_replayed_picks_come_back(native: Model) -> None:
    stage = native.stage("layers.1.indexer")
    inputs = {"x": torch.randn(1, 9, 64).bfloat16(), "q_residual": torch.randn(1, 9, 32).bfloat16()}
    inputs["positions"] = torch.arange(9).unsqueeze(0)
    own = stage.run(**inputs)
    other = own["picks"].flip(-1)
    replayed = stage.run(replay={"picks": other}, **inputs)
    assert torch.equal(replayed["picks"], other)
    assert torch.equal(replayed["scores"], own["scores"])


def test_query_blocks_do_not_change_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    q, keys, weight = torch.randn(1, 33, 4, 8), torch.randn(1, 7, 8), torch.randn(1, 33, 4)
    whole = relu_scores(q, keys, weight)
    monkeypatch.setattr("production.indexer.SCORE_BUDGET", 4 * 7 * 5)
    assert torch.allclose(relu_scores(q, keys, weight), whole, rtol=1e-5, atol=1e-6)
