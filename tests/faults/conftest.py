"""Scenarios prepared once for all tests of a worker, on one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

from cases.faults.catalogue import Scenario
from cases.faults.stand import Stand, prepare


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def stand() -> Callable[[Scenario], Stand]:
    return cache(prepare)
