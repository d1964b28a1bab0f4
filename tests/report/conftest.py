"""Synthetic runs, each written once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from harness.report.html import render
from tests.report.sample import write

Variant = Callable[[str], Path]


@pytest.fixture(scope="session")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Variant:
    """The record file of a variant."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def get(variant: str) -> Path:
        return write(folder / f"{variant}.jsonl", variant)

    return get


@pytest.fixture(scope="session")
def page_file(tmp_path_factory: pytest.TempPathFactory, run_file: Variant) -> Variant:
    """The rendered page of a variant."""
    folder = tmp_path_factory.mktemp("pages")

    @cache
    def get(variant: str) -> Path:
        return render(run_file(variant), folder / f"{variant}.html")

    return get
