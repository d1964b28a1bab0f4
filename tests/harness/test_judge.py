"""Every verdict rule: a clean tensor passes, a planted violation fails, and the reason names it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from harness.judge import cost, exact, figures, margin, picks, rows, sample, ulp, valid
from harness.judge.rows import Pair, combine
from harness.records import TensorComparison, Verdict
from harness.types import Judged

U = 2.0**-8


@dataclass(frozen=True)
class Declared:
    name: str = "y"
    wire: str = "s.y"
    dims: tuple[str, ...] = ("B", "S", "d")
    dtype: str = "bf16"
    role: str = "value"


def signal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rounded_only(y: Tensor) -> Judged:
    """A value whose only rounding is that of the output."""
    zero = torch.zeros_like(y)
    return Judged(y, zero, zero)


def judge(produced: object, y: Tensor, reference: Tensor | None, **declared: str) -> TensorComparison:
    return rows.local(Pair(Declared(**declared), produced, reference), rounded_only(y), y)


def free(produced: object, y: Tensor, reference: Tensor, **declared: str) -> TensorComparison:
    return rows.free(Pair(Declared(**declared), produced, reference), y)


class TestUlp:
    @given(st.floats(min_value=-3e38, max_value=3e38, allow_nan=False), st.sampled_from(["bf16", "fp32"]))
    def test_bounds_the_rounding_of_any_value(self, y: float, dtype: str) -> None:
        exact_y = torch.tensor([y], dtype=torch.float64)
        rounded = exact_y.to(ulp.DTYPES[dtype]).double()
        if torch.isfinite(rounded):
            assert ((rounded - exact_y).abs() <= ulp.half_ulp(exact_y, dtype)).all()

    @given(st.floats(min_value=0, max_value=1e38), st.floats(min_value=0, max_value=1e38))
    def test_never_falls(self, a: float, b: float) -> None:
        low, high = (ulp.half_ulp(torch.tensor([x]).double(), "bf16") for x in sorted((a, b)))
        assert low <= high

    def test_known_values(self) -> None:
        h = ulp.half_ulp(torch.tensor([1.0, 1.99, 2.0, 0.0, math.inf]), "bf16")
        assert h.tolist() == [2**-8, 2**-8, 2**-7, 2.0**-134, math.inf]
        assert float(ulp.half_ulp(torch.tensor([1.0]), "fp32")) == 2.0**-24


class TestValid:
    y = signal(2, 20, 8)

    @pytest.mark.parametrize(
        ("produced", "words"),
        [
            (None, "never written"),
            ([1.0], "returned list"),
            (torch.zeros(2, 20, 9).bfloat16(), "shape [2, 20, 9]"),
            (signal(2, 20, 8).float(), "dtype fp32"),
            (signal(2, 20, 8).bfloat16().index_fill(1, torch.tensor([3]), math.nan), "16 of 320 elements NaN"),
            (signal(2, 20, 8).bfloat16().index_fill(1, torch.tensor([3]), math.inf), "infinite"),
            (torch.zeros(2, 20, 8).bfloat16(), "zero everywhere"),
        ],
    )
    @pytest.mark.parametrize("mode", [judge, free])
    def test_what_production_does_wrong_is_its_fault(self, mode: object, produced: object, words: str) -> None:
        found = mode(produced, self.y, self.y.bfloat16())  # type: ignore[operator]
        assert found.verdict is Verdict.FAIL
        assert words in found.reason

    @pytest.mark.parametrize(
        ("reference", "words"),
        [
            (None, "no such tensor"),
            (torch.zeros(2, 20, 9).bfloat16(), "reference shape"),
            (torch.full((2, 20, 8), math.nan).bfloat16(), "not finite"),
            (torch.ones(2, 20, 8).bfloat16(), "one value everywhere"),
        ],
    )
    def test_what_the_reference_does_wrong_is_invalid(self, reference: Tensor | None, words: str) -> None:
        found = judge(self.y.bfloat16(), self.y, reference)
        assert found.verdict is Verdict.INVALID
        assert words in str(found.reason)

    def test_a_broken_oracle_is_invalid(self) -> None:
        y = self.y.clone()
        y[0, 0, 0] = math.nan
        assert judge(self.y.bfloat16(), y, self.y.bfloat16()).verdict is Verdict.INVALID

    def test_empty_by_design_is_skipped(self) -> None:
        nothing = torch.zeros(2, 0, 8)
        found = judge(nothing.bfloat16(), nothing.double(), nothing.bfloat16())
        assert (found.verdict, found.reason) == (Verdict.SKIPPED, valid.EMPTY)

    def test_constant_by_design_is_no_pass_but_may_fail(self) -> None:
        ones = torch.ones(2, 20, 8)
        assert judge(ones.bfloat16(), ones.double(), ones.bfloat16()).verdict is Verdict.SKIPPED
        assert judge((ones * 1.1).bfloat16(), ones.double(), ones.bfloat16()).verdict is Verdict.FAIL

    def test_minus_infinity_stays_where_the_oracle_has_it(self) -> None:
        y = self.y.clone()
        y[0, 5:] = -math.inf
        clean = y.bfloat16()
        assert judge(clean, y, clean).verdict is Verdict.PASS
        soft = clean.clone()
        soft[0, 7, 2] = -3e38
        found = judge(soft, y, clean)
        assert found.verdict is Verdict.FAIL
        assert "-inf, first [0, 7, 2]" in str(found.reason)
        hard = clean.clone()
        hard[0, 1, 1] = -math.inf
        assert judge(hard, y, clean).verdict is Verdict.FAIL

    def test_shared_storage(self) -> None:
        x = torch.zeros(4)
        assert "shares its storage with w" in str(valid.aliased({"y": x[1:]}, [("w", x)]))
        assert valid.aliased({"y": x.clone()}, [("w", x)]) is None


class TestExact:
    def test_equal_passes_and_the_first_difference_is_named(self) -> None:
        truth = torch.arange(24).reshape(2, 3, 4)
        assert exact.exact(truth.clone(), truth).first is None
        wrong = truth.clone()
        wrong[1, 0, 2] = 7
        wrong[1, 2, 2] = 7
        assert exact.exact(wrong, truth) == exact.Exact(2, (1, 0, 2))

    def test_rows(self) -> None:
        mask = torch.ones(1, 4, 4, dtype=torch.bool).tril()
        wrong = mask.clone()
        wrong[0, 1, 3] = True
        assert judge(mask.clone(), mask, mask, role="exact", dtype="bool").verdict is Verdict.PASS
        found = judge(wrong, mask, mask, role="exact", dtype="bool")
        assert (found.verdict, found.mismatches, found.worst[0].index) == (Verdict.FAIL, 1, (0, 1, 3))
        assert judge(mask.clone(), mask, wrong, role="exact", dtype="bool").verdict is Verdict.INVALID


class TestMargin:
    y = signal(2, 20, 8)

    def test_one_rounding_passes_and_uses_the_whole_margin(self) -> None:
        found = judge(self.y.bfloat16(), self.y, self.y.bfloat16())
        assert found.verdict is Verdict.PASS
        assert found.margin is not None
        assert 0.9 < found.margin <= 1

    def test_one_element_off_by_two_percent_fails_alone(self) -> None:
        wrong = self.y.bfloat16()
        wrong[1, 3, 4] *= 1.02
        found = judge(wrong, self.y, self.y.bfloat16())
        assert found.verdict is Verdict.FAIL
        assert found.worst[0].index == (1, 3, 4)
        assert found.cost is not None
        assert found.cost < 1  # only the margin sees it
        assert found.worst[0].ratio == found.margin

    def test_the_plan_widens_and_the_sum_caps(self) -> None:
        y = torch.ones(1, 1, 1, dtype=torch.float64)
        wide = Judged(y, torch.full_like(y, 0.1), torch.full_like(y, 100.0))
        capped = Judged(y, torch.full_like(y, 0.1), torch.full_like(y, 0.2))
        assert float(margin.bound(wide, "fp32")) == pytest.approx(0.5, rel=1e-6)
        assert float(margin.bound(capped, "fp32")) == pytest.approx(0.2, rel=1e-6)

    def test_a_bound_that_zeros_would_pass_is_no_verdict(self) -> None:
        loose = Judged(self.y, self.y.abs() * 10, self.y.abs() * 10)
        rough = (self.y * 2.5).bfloat16()  # a reference as bad as its bound
        found = rows.local(Pair(Declared(), self.y.bfloat16(), rough), loose, self.y)
        assert found.verdict is Verdict.INCONCLUSIVE

    def test_a_spread_that_is_no_number_is_no_verdict(self) -> None:
        spread = torch.zeros_like(self.y)
        spread[0, 2, 3] = math.nan
        found = rows.local(
            Pair(Declared(), self.y.bfloat16(), self.y.bfloat16()), Judged(self.y, spread, spread), self.y
        )
        assert found.verdict is Verdict.INVALID
        assert "[0, 2, 3]" in str(found.reason)

    def test_zeros_fail_whatever_the_plan(self) -> None:
        plan = Judged(self.y, self.y.abs() * U, self.y.abs() * U * 9)
        mostly = self.y.bfloat16()
        mostly[:, 5:] = 0
        found = rows.local(Pair(Declared(), mostly, self.y.bfloat16()), plan, self.y)
        assert found.verdict is Verdict.FAIL
        assert "exactly zero" in str(found.reason)


class TestCost:
    y = signal(1, 64, 64)

    def test_many_small_errors_inside_a_wide_margin_fail(self) -> None:
        """Every element off by 3 ulp: inside a margin of a noisy plan, but far worse than the reference."""
        plan = Judged(self.y, self.y.abs() * 4 * U, self.y.abs() * 40 * U)
        off = (self.y * (1 + 6 * U)).bfloat16()
        found = rows.local(Pair(Declared(), off, self.y.bfloat16()), plan, self.y)
        assert found.margin is not None
        assert found.margin < 1
        assert found.verdict is Verdict.FAIL
        assert "x the allowed" in str(found.reason)

    def test_an_exact_reference_raises_no_alarm(self) -> None:
        y = self.y.bfloat16().double()
        found = cost.cost(y * U / math.sqrt(3), torch.zeros_like(y), y, "bf16", 64)
        assert found.ratio is not None
        assert found.ratio <= 1

    def test_few_elements_have_no_cost(self) -> None:
        y = signal(1, 1, 31)
        assert cost.cost(y, y, y, "fp32", 1).ratio is None
        assert judge(y.bfloat16(), y, y.bfloat16()).verdict is Verdict.PASS

    def test_a_stat_is_judged_by_cost(self) -> None:
        reference = self.y + 0.1 * signal(1, 64, 64, seed=1)
        near, far = self.y + 0.05 * signal(1, 64, 64, seed=2), self.y + 0.5 * signal(1, 64, 64, seed=2)
        verdicts = [judge(x.float(), self.y, reference.float(), role="stat", dtype="fp32").verdict for x in (near, far)]
        assert verdicts == [Verdict.PASS, Verdict.FAIL]

    def test_a_declared_difference_has_its_own_floor(self) -> None:
        off = (self.y * 1.05).bfloat16()
        declared = [
            rows.local(Pair(Declared(), off, self.y.bfloat16(), declared=("meant", f)), rounded_only(self.y), self.y)
            for f in (0.06, 0.04)
        ]
        assert [d.verdict for d in declared] == [Verdict.PASS, Verdict.FAIL]
        assert "declared difference (meant" in str(declared[0].reason)


class TestPicks:
    scores = torch.tensor([[5.0, 4.0, 3.0, 2.9, -math.inf], [5.0, -math.inf, -math.inf, -math.inf, -math.inf]])

    def of(self, chosen: list[list[int]], rss: float = 0.0) -> picks.Picks:
        spread = torch.full((2, 5), rss, dtype=torch.float64)
        return picks.picks(torch.tensor(chosen), Judged(self.scores.double(), spread, spread * 10))

    def test_sets_not_orders(self) -> None:
        for first in ([0, 1, 2], [2, 0, 1]):
            found = self.of([first, [0, -1, -1]])
            assert (found.outside, found.flips, found.worst) == (0, 0, None)

    def test_a_flip_inside_the_bound_is_counted(self) -> None:
        found = self.of([[0, 1, 3], [0, -1, -1]], rss=0.02)
        assert (found.outside, found.flips) == (0, 1)
        row, gap, room = found.examples[0]
        assert (row, gap, room) == (0, pytest.approx(0.1), pytest.approx(0.2, rel=1e-5))

    @pytest.mark.parametrize(
        ("chosen", "reason"),
        [
            ([[0, 1, 3], [0, -1, -1]], "a pick that no rounding explains"),
            ([[0, 1, 1], [0, -1, -1]], "the same id twice"),
            ([[0, 1, 7], [0, -1, -1]], "an id out of range"),
            ([[0, 1, -2], [0, -1, -1]], "an id out of range"),
            ([[0, 1, 2], [0, 2, -1]], "an ineligible candidate"),
            ([[0, 1, -1], [0, -1, -1]], "a wrong number of picks"),
            ([[0, 1, 2], [-1, -1, -1]], "a wrong number of picks"),
        ],
    )
    def test_what_no_rounding_explains_fails(self, chosen: list[list[int]], reason: str) -> None:
        found = self.of(chosen)
        assert found.outside == 1
        assert found.reason == reason

    def test_exact_ties_may_fall_either_way(self) -> None:
        score = torch.tensor([[1.0, 2.0, 1.0, 1.0]]).double()
        for other in (0, 2, 3):
            assert picks.picks(torch.tensor([[1, other]]), rounded_only(score)).outside == 0

    def test_no_candidates_at_all(self) -> None:
        none = torch.zeros(3, 0, dtype=torch.float64)
        assert picks.picks(torch.zeros(3, 0, dtype=torch.int64), rounded_only(none)).outside == 0

    @given(st.integers(0, 2**32), st.integers(1, 4))
    def test_perturbed_scores_within_the_bound_never_fail(self, seed: int, k: int) -> None:
        g = torch.Generator().manual_seed(seed)
        score = torch.randn(7, 9, dtype=torch.float64, generator=g)
        spread = 0.05 + torch.rand(7, 9, dtype=torch.float64, generator=g)
        judged = Judged(score, spread, spread * 100)
        noise = (torch.rand(7, 9, dtype=torch.float64, generator=g) * 2 - 1) * margin.spread(judged)
        assert picks.picks((score + noise).topk(k, -1).indices, judged).outside == 0


class TestFree:
    y = signal(1, 256, 16)

    def noisy(self, size: float, seed: int) -> Tensor:
        return (self.y + size * signal(1, 256, 16, seed=seed)).bfloat16()

    def test_as_noisy_as_the_reference_passes_and_twice_as_noisy_fails(self) -> None:
        reference = self.noisy(0.1, 1)
        assert free(self.noisy(0.1, 2), self.y, reference).verdict is Verdict.PASS
        found = free(self.noisy(0.2, 2), self.y, reference)
        assert found.verdict is Verdict.FAIL
        assert found.margin is None

    def test_luck_shrinks_with_tokens(self) -> None:
        assert [round(sample.luck(n), 2) for n in (8, 32, 62, 170)] == [11.16, 2.71, 2.0, 1.5]
        assert sample.luck(1) > 1e5
        assert sample.luck(0) == sample.luck(1)
        assert sample.luck(1e9) == pytest.approx(1, abs=1e-3)

    def test_tokens_count_by_the_error_they_carry(self) -> None:
        even = torch.ones(2, 50, 7)
        assert sample.carriers(even) == pytest.approx(100)
        even[0, 0] = 1e6
        assert sample.carriers(even) == pytest.approx(1)
        assert sample.carriers(torch.zeros(1, 9, 2)) == 9

    @given(st.integers(0, 2**32), st.integers(2, 60))
    def test_equally_noisy_sides_never_fail_over_few_tokens(self, seed: int, tokens: int) -> None:
        """Errors that all elements of a token share: the hardest case for an RMS (of the local rule, too)."""
        g = torch.Generator().manual_seed(seed)
        y = torch.randn(1, tokens, 32, dtype=torch.float64, generator=g)
        shared = [1e-2 * torch.randn(1, tokens, 1, dtype=torch.float64, generator=g) * y for _ in range(2)]
        found = free((y + shared[0]).float(), y, (y + shared[1]).float(), dtype="fp32")
        assert found.verdict in (Verdict.PASS, Verdict.SKIPPED)
        plan = Judged(y, 0.1 * y.abs(), y.abs())
        near = rows.local(Pair(Declared(dtype="fp32"), (y + shared[0]).float(), (y + shared[1]).float()), plan, y)
        assert near.verdict is Verdict.PASS

    def test_over_few_tokens_only_a_gross_error_fails(self) -> None:
        y = signal(1, 12, 64)
        reference = (y * (1 + 1e-3 * signal(1, 12, 64, seed=1))).float()
        verdicts = [free((y * f).float(), y, reference, dtype="fp32").verdict for f in (1.002, 1.1)]
        assert verdicts == [Verdict.PASS, Verdict.FAIL]
        two = free(y[:, :2].float(), y[:, :2], reference[:, :2], dtype="fp32")
        assert (two.verdict, "too few" in str(two.reason)) == (Verdict.SKIPPED, True)

    def test_an_ill_conditioned_reference_decides_nothing(self) -> None:
        assert free(self.noisy(0.5, 2), self.y, self.noisy(2.0, 1)).verdict is Verdict.INCONCLUSIVE

    def test_few_elements_are_skipped(self) -> None:
        y = signal(1, 1, 8)
        assert free(y.bfloat16(), y, y.bfloat16()).verdict is Verdict.SKIPPED

    def test_picks_must_be_the_replayed_ones(self) -> None:
        p = torch.tensor([[0, 1], [2, 3]])
        scores = torch.zeros(2, 4).double()
        pair = Pair(Declared(role="picks", dtype="int64", dims=("S", "k")), p.flip(1), p)
        assert rows.free(pair, scores, replayed=True).verdict is Verdict.FAIL
        assert rows.free(Pair(pair.output, p.clone(), p), scores, replayed=True).verdict is Verdict.SKIPPED


class TestFigures:
    def test_slices_find_the_guilty_head_and_expert(self) -> None:
        y = signal(1, 40, 4, 8)
        wrong = y.bfloat16()
        ids = torch.arange(40).reshape(1, 40) % 5
        wrong[:, :, 2] *= 1.5
        wrong[ids == 3] *= 3
        declared = Declared(dims=("B", "S", "H", "D"))
        found = rows.local(Pair(declared, wrong, y.bfloat16(), groups={"expert": ids}), rounded_only(y), y)
        by_dim = {s.dim: s for s in found.slices}
        assert set(by_dim) == {"S", "H", "D", "expert"}
        assert by_dim["H"].relative.index(max(by_dim["H"].relative)) == 2  # type: ignore[type-var]
        assert by_dim["expert"].worst.index(max(by_dim["expert"].worst)) == 3  # type: ignore[type-var]
        assert by_dim["S"].width == 2
        assert len(found.tokens) == 40
        assert found.slope is not None
        assert found.slope > 1.2

    def test_histogram_and_density_count_everything(self) -> None:
        x, y = signal(50, 4), signal(50, 4, seed=1)
        hist, grid = figures.histogram(x), figures.density(x, y)
        assert hist is not None
        assert sum(hist.counts) == 200
        assert grid is not None
        assert sum(map(sum, grid.rows)) == 200
        assert figures.histogram(torch.zeros(3)) is None
        assert figures.density(torch.zeros(3), torch.zeros(3)) is None


def test_the_worst_kind_decides_a_row() -> None:
    y = signal(2, 20, 8)
    good = judge(y.bfloat16(), y, y.bfloat16())
    bad = judge((y * 1.5).bfloat16(), y, y.bfloat16(), name="z")
    assert combine([good, bad]) == (Verdict.FAIL, bad)
    assert combine([good]) == (Verdict.PASS, good)
    assert combine([]) == (Verdict.SKIPPED, None)
