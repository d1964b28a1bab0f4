"""The source folder `kernels/` must not stand in the way of the distribution of that name.

transformers imports PyPI's `kernels` when it is installed. A regular package anywhere on the path wins over a folder
without `__init__.py`, so both orders of the path are tried here, from the repository root.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = """
import importlib.util
import transformers.models.deepseek_v4.modeling_deepseek_v4 as modeling
spec = importlib.util.find_spec("kernels")
print(modeling.DeepseekV4DecoderLayer.__name__, spec.origin if spec else None)
"""


def run_from_root(extra_path: Path | None) -> str:
    env = dict(os.environ, HF_HUB_OFFLINE="1")
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([str(extra_path)] if extra_path else [])])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_transformers_imports_from_the_root() -> None:
    assert run_from_root(None).startswith("DeepseekV4DecoderLayer")


@pytest.mark.parametrize("version", ["0.0.1", "99.0"])
def test_an_installed_kernels_wins_over_our_folder(tmp_path: Path, version: str) -> None:
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    info = tmp_path / f"kernels-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    assert run_from_root(tmp_path) == f"DeepseekV4DecoderLayer {package / '__init__.py'}"
