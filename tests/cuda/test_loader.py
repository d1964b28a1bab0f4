"""The kernel loader on a machine without a GPU: what it compiles, what it refuses, and that nothing falls back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.cli import main
from production.cuda import loader
from production.errors import ProductionError

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSV4_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@needs_nvcc
def test_build_compiles_once_and_spills_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build"]) == 0
    first = capsys.readouterr().out
    assert main(["build", "--arch", "sm_90a"]) == 0
    second = capsys.readouterr().out
    assert first.startswith("compiled ")
    assert second.startswith("found ")
    assert "7 kernels, 0 spill registers" in first


def test_wrong_arch_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--arch", "sm_80"]) == 2
    assert capsys.readouterr().err == "harness: build: cuda: arch: expected sm_90a, came 'sm_80'\n"


def test_no_nvcc_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.shutil, "which", lambda _: None)
    monkeypatch.setattr(loader.Path, "is_file", lambda _: False)
    assert main(["build"]) == 2
    assert "expected nvcc, came none on PATH" in capsys.readouterr().err


@needs_nvcc
def test_failed_compile_names_the_error_and_leaves_nothing(tmp_path: Path, own_cache: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    (source / "bad.cu").write_text("int f() { return missing; }\n")
    with pytest.raises(ProductionError, match='"missing" is undefined'):
        loader.build(at=source)
    assert list(own_cache.iterdir()) == []


def test_hash_follows_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("1")
    first = loader.source_hash(tmp_path)
    (tmp_path / "notes.md").write_text("not compiled")
    assert loader.source_hash(tmp_path) == first
    (tmp_path / "a.cu").write_text("2")
    assert loader.source_hash(tmp_path) != first


def test_spills_are_read() -> None:
    log = (
        "Compiling entry function 'k' for 'sm_90a'\n 8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\n"
    )
    assert loader.spills(log) == {"k": 40}


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ("*_hc=cuda", "backend cuda: expected a kernel that can run here, came no GPU, says the test"),
        ("*router=cuda", "came no kernel"),
        ("*_hc=gpu", "expected torch, cuda or best, got 'gpu'"),
        ("nothing=cuda", "nothing"),
    ],
)
def test_backend_never_falls_back(
    wish: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "unavailable", lambda: "no GPU, says the test")
    assert main(["diff", "--layer", "2", "--backend", wish]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_components_say_why_cuda_is_unavailable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "unavailable", lambda: "no GPU, says the test")
    assert main(["list", "components"]) == 0
    text = capsys.readouterr().out
    assert text.count("backends torch, cuda (no GPU, says the test)") == 3
    assert "backends torch, cuda (no kernel)" in text
