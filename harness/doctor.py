"""``harness doctor``: is everything here that a run needs, and is the reference certified on this machine?"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from harness import __version__
from harness import case as case_files
from harness.types import InvalidRun, UsageError

NEEDED = ("torch", "transformers", "safetensors", "tokenizers", "numpy", "rich", "jinja2")
OPTIONAL = ("nvidia-cutlass-dsl", "pytest", "kernels")
TOKENS = 8  # enough for every mask and two compressed windows, and quick

Line = tuple[str, str, str]  # ok | no | -, what, detail ("-": optional and absent)


def doctor(out: TextIO) -> int:
    """Print what was found; 0 if a run can work, 3 if the reference is not certified, else 1."""
    worst = 0
    for state, what, detail in (*_versions(), *_machine(), *_files(), *_certified()):
        print(f"{state:<3} {what:<22} {detail}", file=out, flush=True)
        if state == "no":
            worst = 3 if what == "certification" else worst or 1
    print("ready" if not worst else "not ready: see the lines that start with no", file=out)
    return worst


def _versions() -> Iterator[Line]:
    yield "ok", "harness", __version__
    yield "ok", "python", platform.python_version()
    for name in (*NEEDED, *OPTIONAL):
        try:
            yield "ok", name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield ("no", name, f"not installed: pip install {name}") if name in NEEDED else ("-", name, "not installed")


def _machine() -> Iterator[Line]:
    import torch

    yield "ok", "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads"
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(i)
            yield "ok", f"gpu {i}", f"{torch.cuda.get_device_name(i)}, sm_{major}{minor}"
    else:
        yield "-", "gpu", "none: the portable path runs"
    nvcc = shutil.which("nvcc") or next((p for p in ("/usr/local/cuda/bin/nvcc",) if Path(p).exists()), None)
    yield ("ok", "nvcc", _nvcc(nvcc)) if nvcc else ("-", "nvcc", "none: CUDA sources cannot be compiled here")


def _nvcc(path: str) -> str:
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path}: {error}"
    release = next((line.strip() for line in text.splitlines() if "release" in line), "version unknown")
    return f"{path}: {release}"


def _files() -> Iterator[Line]:
    names = case_files.bundled()
    yield ("ok" if names else "no", "cases", ", ".join(names) or "none bundled")
    here = Path.cwd()
    yield ("ok" if os.access(here, os.W_OK) else "no", "write access", str(here))


def _certified() -> Iterator[Line]:
    """Compose a short run of the bundled case and compare it with the untouched model."""
    from harness import sides
    from harness.execute import compose

    try:
        case = replace(case_files.load("tiny"), length=TOKENS)
        yield "ok", "checkpoint", str(case.checkpoint)
        inputs = case_files.inputs(case, case_files.sequence(case))
        reference = sides.reference(case.reference, case.checkpoint, case.dtype)
        side = sides.production(case.production, case.checkpoint, case.dtype)
        yield "ok", "production", f"{len(side.stages)} stages"
        wires = compose(reference.stages, [s.name for s in reference.stages], inputs)
        checks = list(reference.certify(inputs, wires))
    except UsageError as error:
        yield "no", "checkpoint", str(error)
        return
    except InvalidRun as error:
        yield "no", "certification", str(error)
        return
    bad = [check for check in checks if not check.ok]
    detail = (
        f"{bad[0].name}: {bad[0].detail}" if bad else f"{len(checks)} checks: the reference is the unmodified model"
    )
    yield ("no" if bad or not checks else "ok", "certification", detail)
