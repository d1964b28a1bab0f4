"""Sessions: however a sequence is cut into calls, whoever shares the call, its logits and caches are the same.

The measure is the whole prompt in one call without caches, with the limit of ``tests.production.check.CACHE_LIMIT``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from production.build import Model, model
from production.cache.sequence import scattered, tensors_of
from production.errors import ProductionError
from production.session import Session
from tests.production import synthetic
from tests.production.check import assert_close

TOKENS = 150  # nine windows of 16, 37 of 4, every ring wrapped


@pytest.fixture(scope="module")
def m(fp32: Model) -> Model:
    return fp32


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, synthetic.CONFIG["vocab_size"], (TOKENS,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def whole(m: Model, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return m.forward(ids.unsqueeze(0))[0]


def cut(ids: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    start = 0
    for size in cycle(sizes):
        if start >= len(ids):
            return
        yield ids[start : start + size]
        start += size


def feed(session: Session, ids: Tensor, sizes: Sequence[int], row: int = 0) -> Tensor:
    """Logits of one row fed in calls of these sizes, the other rows sitting out."""
    made = []
    for part in cut(ids, sizes):
        calls: list[Tensor | None] = [None] * len(session.sequences)
        calls[row] = part
        got = session.feed(calls)[row]
        assert got is not None
        made.append(got)
    return torch.cat(made)


def assert_same_state(one: Session, other: Session, row: int = 0, at: int = 0) -> None:
    mine, theirs = one.state(at), other.state(row)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.shape == theirs[name].shape, name
        assert_close(tensor, theirs[name])


@pytest.mark.parametrize("size", [1, 3, 4, 5, 15, 16, 17, 33, TOKENS])
def test_chunks_are_one_prompt(m: Model, ids: Tensor, whole: Tensor, size: int) -> None:
    session = Session(m, tokens=TOKENS)
    assert_close(feed(session, ids, [size]), whole)
    assert session.lengths == [TOKENS]
    one = Session(m, tokens=TOKENS)
    one.feed([ids])
    assert_same_state(session, one)


def test_uneven_chunks_then_single_tokens(m: Model, ids: Tensor, whole: Tensor) -> None:
    session = Session(m, tokens=TOKENS)
    got = torch.cat((feed(session, ids[:90], [1, 7, 2, 31]), feed(session, ids[90:], [1])))
    assert_close(got, whole)


def test_bf16_logits_stay_within_their_own_noise(native: Model, ids: Tensor) -> None:
    """bf16 rounds activations, so cutting a prompt may flip a rounding, and by it a pick; most steps are equal."""
    with torch.no_grad():
        expected = native.forward(ids.unsqueeze(0))[0]
    got = feed(Session(native, tokens=TOKENS), ids, [5])
    rows = (got - expected).square().mean(-1).sqrt() / expected.square().mean().sqrt()
    assert float(rows.median()) < 0.02


def test_last_gives_the_last_row_only(m: Model, ids: Tensor, whole: Tensor) -> None:
    session = Session(m, tokens=TOKENS, rows=2)
    first, second = session.feed([ids[:40], ids[:23]], last=True)
    assert first is not None
    assert second is not None
    assert_close(torch.cat((first, second)), whole[[39, 22]])


def test_rows_of_unequal_lengths_do_not_see_each_other(m: Model, ids: Tensor) -> None:
    lengths = [60, 1, 16, 35]
    rows = [ids[7 * i : 7 * i + n] for i, n in enumerate(lengths)]
    together = Session(m, tokens=TOKENS, rows=4)
    got = [together.feed(rows)]
    for step in range(20):  # ragged decode; the second row sits every other step out
        got.append(together.feed([None if i == 1 and step % 2 else ids[step + i : step + i + 1] for i in range(4)]))
    for i, row in enumerate(rows):
        alone = Session(m, tokens=TOKENS)
        parts = [t for call in got if (t := call[i]) is not None]
        steps = [s for s in range(20) if not (i == 1 and s % 2)]
        fed = [alone.feed([row])[0], *(alone.feed([ids[s + i : s + i + 1]])[0] for s in steps)]
        assert_close(torch.cat(parts), torch.cat([t for t in fed if t is not None]))
        assert_same_state(alone, together, row=i)


@pytest.mark.parametrize("seed", [0, 1])
def test_page_order_and_unused_memory_do_not_matter(m: Model, ids: Tensor, seed: int) -> None:
    """Bit for bit: pages in any order, NaN wherever nothing was written, stale bytes of an earlier sequence."""
    plain, shuffled = Session(m, tokens=TOKENS, rows=2), Session(m, tokens=TOKENS, rows=2)
    scattered(shuffled.store, torch.Generator().manual_seed(seed))
    for s in (plain, shuffled):
        s.feed([ids[:33], ids[50:60]])
    with torch.no_grad():
        for step in range(40):
            a, b = plain.feed([ids[step : step + 1]] * 2), shuffled.feed([ids[step : step + 1]] * 2)
            for x, y in zip(a, b, strict=True):
                assert x is not None
                assert y is not None
                assert torch.equal(x, y)


def test_high_pages_first(m: Model, ids: Tensor) -> None:
    low, high = Session(m, tokens=TOKENS), Session(m, tokens=TOKENS)
    for group in high.store.groups.values():
        group.free.reverse()
    assert torch.equal(feed(low, ids, [50, 1]), feed(high, ids, [50, 1]))


@pytest.mark.parametrize("taken", [1, 2, 3, 4, 5, 16, 17])
@pytest.mark.parametrize("length", [30, 32, 33, 64])
def test_rollback_is_as_if_never_fed(m: Model, ids: Tensor, length: int, taken: int) -> None:
    draft = ids.flip(0)[:taken]
    session, serial = Session(m, tokens=TOKENS, draft=17), Session(m, tokens=TOKENS, draft=17)
    for s in (session, serial):
        s.feed([ids[:length]])
    session.feed([draft])
    session.rollback(taken)
    assert_same_state(session, serial)
    assert torch.equal(feed(session, ids[length:], [7, 1]), feed(serial, ids[length:], [7, 1]))
    assert session.store.bytes_in_pages == serial.store.bytes_in_pages


def test_partly_accepted_drafts_are_serial_decoding(m: Model, ids: Tensor, whole: Tensor) -> None:
    """Draft 5 wrong or right tokens, keep j of them: after every step as token by token."""
    session = Session(m, tokens=TOKENS, draft=5)
    session.feed([ids[:20]])
    at, accepted = 20, cycle([0, 1, 2, 3, 4, 5])
    while at < 120:
        keep = next(accepted)
        wrong = (ids[at + keep : at + 5] + 1) % synthetic.CONFIG["vocab_size"]
        logits = session.feed([torch.cat((ids[at : at + keep], wrong))])[0]
        assert logits is not None
        assert_close(logits[:keep], whole[at : at + keep])
        session.rollback(5 - keep)
        at += keep
    serial = Session(m, tokens=TOKENS)
    serial.feed([ids[:at]])
    assert_same_state(session, serial)


def test_rollback_past_the_draft_is_refused(m: Model, ids: Tensor) -> None:
    session = Session(m, tokens=TOKENS, draft=3)
    session.feed([ids[:40]])
    session.rollback(2)
    with pytest.raises(ProductionError, match=r"rollback: expected 0\.\.1 tokens, came 2"):
        session.rollback(2)
    session.rollback(1)
    assert session.lengths == [37]


def test_a_fork_shares_the_past_and_nothing_else(m: Model, ids: Tensor, whole: Tensor) -> None:
    session = Session(m, tokens=TOKENS, spare=1)
    session.feed([ids[:50]])
    alone = session.store.bytes_in_pages
    other = session.fork()
    assert session.store.bytes_in_pages == alone
    got = [session.feed([ids[50 + i : 51 + i], ids[10 + i : 11 + i]]) for i in range(40)]
    assert_close(torch.cat([g[0] for g in got if g[0] is not None]), whole[50:90])
    fresh = Session(m, tokens=TOKENS)
    fresh.feed([ids[:50]])
    assert_close(
        torch.cat([g[1] for g in got if g[1] is not None]),
        torch.cat([fresh.feed([ids[10 + i : 11 + i]])[0] for i in range(40)]),  # type: ignore[misc]
    )
    assert_same_state(fresh, session, row=other)
    with pytest.raises(ProductionError, match="fork: expected at most 2 rows"):
        session.fork()


def test_cold_is_warm(m: Model, ids: Tensor) -> None:
    """A row that was used before, and a prefix that another row has computed, change nothing: bit for bit."""
    cold = Session(m, tokens=TOKENS)
    expected = feed(cold, ids[:70], [70]), feed(cold, ids[70:], [1])
    warm = Session(m, tokens=TOKENS)
    feed(warm, ids.flip(0), [TOKENS])
    warm.reset()
    assert warm.store.bytes_in_pages == 0
    assert torch.equal(feed(warm, ids[:70], [70]), expected[0])
    assert torch.equal(feed(warm, ids[70:], [1]), expected[1])
    prefix = Session(m, tokens=TOKENS, spare=1)
    prefix.feed([ids[:70]])
    hit = prefix.fork()
    feed(prefix, ids.flip(0)[:60], [1])
    assert torch.equal(feed(prefix, ids[70:], [1], row=hit), expected[1])


def test_a_step_writes_one_row_a_layer(m: Model, ids: Tensor) -> None:
    """No step touches more of a storage than the rows that it adds, and no storage ever moves."""
    session = Session(m, tokens=TOKENS)
    session.feed([ids[:61]])
    before = [(t, t.data_ptr(), t.clone()) for t in tensors_of(session.store)]
    session.feed([ids[61:62]])
    for tensor, place, old in before:
        assert tensor.data_ptr() == place
        assert int(((tensor != old) & ~(tensor.isnan() & old.isnan())).any(-1).sum()) <= 1


@pytest.mark.parametrize("tokens", [1, 16, 63, 150])
def test_memory_is_the_formula(m: Model, ids: Tensor, tokens: int) -> None:
    """Beyond it, the empty rows of the last pages only."""
    session = Session(m, tokens=TOKENS)
    session.feed([ids[:tokens]])
    slack = sum(t.group.page_bytes for t in session.sequences[0].tables.values())
    formula = session.layout.bytes(tokens)
    assert formula <= session.sequences[0].bytes < formula + slack


def test_a_full_cache_says_so_before_it_writes(m: Model, ids: Tensor) -> None:
    session = Session(m, tokens=32)
    session.feed([ids[:30]])
    with pytest.raises(ProductionError, match="at most 32 tokens a row, came 30 and 3 more"):
        session.feed([ids[:3]])
    assert session.lengths == [30]
    session.feed([ids[:2]])


def test_a_failed_call_leaves_no_half_written_row(m: Model, ids: Tensor) -> None:
    session = Session(m, tokens=64, rows=2)
    session.feed([ids[:5], ids[:9]])
    with pytest.raises(ProductionError, match="token ids"):
        session.feed([[99], None])
    with pytest.raises(ProductionError, match="reset the row"):
        session.feed([[1], None])
    session.feed([None, [1]])
    session.reset(0)
    session.feed([[1], None])


def test_calls_that_mean_nothing(m: Model) -> None:
    session = Session(m, tokens=64, rows=2)
    with pytest.raises(ProductionError, match="one list of tokens for each of 2 rows"):
        session.feed([[1]])
    with pytest.raises(ProductionError, match="at least one token"):
        session.feed([None, []])


def test_unpacked_weights_give_the_same_bits(m: Model, ids: Tensor) -> None:
    packed, prepared = (Session(m, tokens=64, prepared=p) for p in (False, True))
    assert torch.equal(feed(packed, ids[:40], [37, 1]), feed(prepared, ids[:40], [37, 1]))


def test_a_long_context_that_no_list_of_picks_covers(tmp_path: Path) -> None:
    """More entries than the top k by far, HCA windows of 128 as in the real models."""
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    folder = synthetic.checkpoint(tmp_path / "long", compress_rates=rates, sliding_window=128)
    m = model(folder, dtype="fp32")
    ids = torch.randint(0, 50, (700,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = m.forward(ids.unsqueeze(0))[0]
    for size in (5, 127, 128, 129):
        assert_close(feed(Session(m, tokens=700), ids, [size]), expected)
