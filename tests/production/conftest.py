"""Fixtures of the production tests: one synthetic checkpoint and the models built from it, made once a run."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch

from production.build import Model, model
from tests.production import synthetic


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Every test draws its own numbers, the same ones in every run."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def native(folder: Path) -> Model:
    return model(folder)


@pytest.fixture(scope="session")
def fp32(folder: Path) -> Model:
    return model(folder, dtype="fp32")
