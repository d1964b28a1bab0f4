"""The Sinkhorn that the kernel runs, compiled for the host, against the oracle's bound."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from production.cuda import loader
from production.hyper_connection import sinkhorn

EPS = 1e-6
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    out = tmp_path_factory.mktemp("twins") / "twins.so"
    source = loader.folder() / "host_twins.cpp"
    subprocess.run(["g++", "-O2", "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(out)], check=True)
    return ctypes.CDLL(str(out))


def run(twins: ctypes.CDLL, logits: Tensor, iterations: int, eps: float = EPS) -> Tensor:
    out = torch.full_like(logits, float("nan"))
    twins.dsv4_host_sinkhorn(
        ctypes.c_void_p(logits.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_long(len(logits)),
        ctypes.c_int(iterations),
        ctypes.c_float(eps),
    )
    return out


def off(comb: Tensor, logits: Tensor, iterations: int) -> float:
    """Worst error over the size of an entry, in fp32 roundings, against float64."""
    truth = sinkhorn(logits.double(), iterations, EPS)
    return float(((comb.double() - truth).abs() / truth).max() / 2**-24)


#: Each of 2 * iterations divisions adds at most 3 roundings of a sum, 1 of eps and 1 of its own; the softmax adds 2 of
#: the exponential, 1 of the difference times the logits' range, and the same sums. Normalising does not amplify.
def limit(logits: Tensor, iterations: int) -> float:
    reach = float(logits.amax(-1).sub(logits.amin(-1)).max())
    return 5 * 2 * iterations + 8 + 2 * reach


@needs_gxx
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.sampled_from([0.0, 0.1, 1.0, 5.0]), iterations=st.integers(1, 20))
def test_host_twin_meets_float64(twins: ctypes.CDLL, seed: int, size: float, iterations: int) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(9, 4, 4, generator=g) * size
    assert off(run(twins, logits, iterations), logits, iterations) <= limit(logits, iterations)


@needs_gxx
def test_wrong_ways_are_seen(twins: ctypes.CDLL) -> None:
    """One iteration fewer, no eps, rows for columns: each is far outside."""
    logits = torch.randn(9, 4, 4, generator=torch.Generator().manual_seed(1)) * 5
    assert off(run(twins, logits, 19), logits, 20) > 10 * limit(logits, 20)
    assert off(run(twins, logits, 20, 0.0), logits, 20) > limit(logits, 20)
    turned = run(twins, logits.transpose(1, 2).contiguous(), 20).transpose(1, 2)
    assert off(turned, logits, 20) > 10 * limit(logits, 20)
