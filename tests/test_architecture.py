"""The import directions of the project, read from the syntax trees."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"harness", "reference", "production", "cases", "kernels", "csrc", "tests"}

#: package -> the packages of ours that it may import, as dotted prefixes
ALLOWED: dict[str, set[str]] = {
    "harness": {"harness"},
    "reference": {"reference", "harness.types"},
    "production": {"production"},
}
FOREIGN = {"harness": {"transformers"}, "production": {"transformers"}}


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports; relative imports are resolved against its package."""
    package = path.relative_to(ROOT).parent.parts
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module or ""]))
            found |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in {
            "import_module",
            "__import__",
        }:
            found |= {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    return found


def within(name: str, prefixes: set[str]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in prefixes)


def violations(package: str, path: Path) -> list[str]:
    return sorted(
        name
        for name in imports(path)
        if (name.split(".")[0] in OURS and not within(name, ALLOWED[package]))
        or within(name, FOREIGN.get(package, set()))
    )


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_point_one_way(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"{package}/ holds no Python file: nothing was checked"
    assert {str(f.relative_to(ROOT)): v for f in files if (v := violations(package, f))} == {}


def test_the_check_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_architecture.ROOT", tmp_path)
    bad = tmp_path / "production" / "sly.py"
    bad.parent.mkdir()
    bad.write_text(
        "from harness.types import Stage\nimport reference.build\nfrom . import fine\n"
        "import importlib\nimportlib.import_module('harness.engine')\n"
    )
    assert violations("production", bad) == ["harness.engine", "harness.types.Stage", "reference.build"]


def test_kernel_sources_are_no_package() -> None:
    """The import name `kernels` belongs to another distribution; a package here would shadow it."""
    assert not list(ROOT.glob("kernels/**/__init__.py"))
    assert not list(ROOT.glob("csrc/**/__init__.py"))
