"""Compiles csrc/*.cu with nvcc into one shared object per architecture and loads it with ctypes.

The file's name holds a hash of the sources, the flags and nvcc's version, so an object is never older than its sources.
Compiling needs nvcc and no GPU; loading for a launch needs both a GPU of the architecture and the CUDA build of torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from production.errors import ProductionError

ARCHES = {"sm_90a": (9, 0)}  # what the kernels are written for, and the capability that runs it
FLAGS = ("-O3", "-std=c++17", "-Xptxas", "-v", "-Xcompiler", "-fPIC", "-shared")
SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)
ENTRY = re.compile(r"Compiling entry function '(\w+)'")


@dataclass(frozen=True)
class Built:
    """A shared object, and what ptxas said about its kernels."""

    path: Path
    arch: str
    sources: str  # hash of csrc/ alone
    spills: dict[str, int]  # mangled kernel -> bytes spilled
    fresh: bool  # compiled by this call


def folder() -> Path:
    """csrc/ of the source tree, or the copy that the wheel ships."""
    root = Path(__file__).resolve().parent.parent
    for place in (root / "_sources" / "csrc", root.parent / "csrc"):
        if place.is_dir():
            return place
    raise ProductionError("cuda", expected="the kernel sources (csrc/)", came="none beside production")


def source_hash(at: Path | None = None) -> str:
    """Of every .cu and .cuh by name and content; 16 hex digits."""
    at = at or folder()
    return _hash(at, [p for p in at.rglob("*") if p.suffix in (".cu", ".cuh")])


def unit_hashes(at: Path | None = None) -> dict[str, str]:
    """Of each .cu with the headers that it includes, by the file's name: what evidence about its kernels is tied to."""
    at = at or folder()
    return {path.name: _hash(at, _with_headers(path)) for path in sorted(at.glob("*.cu"))}


def _with_headers(path: Path) -> set[Path]:
    found, todo = set(), [path.resolve()]
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo += [(one.parent / name).resolve() for name in INCLUDE.findall(one.read_text())]
    return found


def _hash(at: Path, paths: Iterable[Path]) -> str:
    digest, at = hashlib.sha256(), at.resolve()
    for path in sorted(p.resolve() for p in paths):
        digest.update(f"{path.relative_to(at).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def nvcc() -> str:
    """The compiler's path: $NVCC, on PATH, or in its usual place."""
    usual = "/usr/local/cuda/bin/nvcc"
    found = shutil.which(os.environ.get("NVCC") or "nvcc") or (usual if Path(usual).is_file() else None)
    if found is None:
        raise ProductionError("cuda", expected="nvcc", came="none on PATH", fix="install CUDA 13 or set NVCC")
    return found


def cache() -> Path:
    """$DSV4_CACHE, or the user's cache folder."""
    given = os.environ.get("DSV4_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else base / "dsv4-harness"


def build(arch: str = "sm_90a", at: Path | None = None) -> Built:
    """Compile, or find what was compiled from the same sources, flags and compiler before."""
    if arch not in ARCHES:
        raise ProductionError("cuda: arch", expected=" or ".join(ARCHES), came=repr(arch))
    at, compiler = at or folder(), nvcc()
    version = _run([compiler, "--version"], "nvcc --version").strip().splitlines()[-1]
    sources = source_hash(at)
    key = hashlib.sha256("\0".join((sources, arch, version, *FLAGS)).encode()).hexdigest()[:16]
    path = cache() / f"kernels-{arch}-{key}.so"
    log = path.with_suffix(".log")
    fresh = not (path.is_file() and log.is_file())
    if fresh:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as work:
                made = Path(work) / path.name
                gencode = f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}"
                text = _run([compiler, *FLAGS, gencode, "-o", str(made), *map(str, sorted(at.glob("*.cu")))], "nvcc")
                log.write_text(text)
                made.replace(path)  # whole or not at all, whoever else compiles
        except OSError as error:
            raise ProductionError(
                "cuda: cache", expected=f"a folder to write, {path.parent}", came=str(error), fix="set DSV4_CACHE"
            ) from error
    return Built(path, arch, sources, spills(log.read_text()), fresh)


def spills(log: str) -> dict[str, int]:
    """Bytes that each kernel stores and loads for want of registers, from ``ptxas -v``."""
    found: dict[str, int] = {}
    kernel = ""
    for line in log.splitlines():
        if entry := ENTRY.search(line):
            kernel = entry.group(1)
        elif (bytes_ := SPILL.search(line)) and kernel:
            found[kernel] = int(bytes_.group(1)) + int(bytes_.group(2))
            kernel = ""
    return found


def unavailable() -> str | None:
    """Why kernels cannot be launched here; None if they can, as far as one can know before compiling."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA GPU here" if torch.version.cuda else "this torch was built without CUDA"
    capability = torch.cuda.get_device_capability()
    if capability not in ARCHES.values():
        return f"the GPU is sm_{capability[0]}{capability[1]}, kernels are for {', '.join(ARCHES)}"
    try:
        nvcc()
    except ProductionError as error:
        return str(error)
    return None


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The kernels, ready to launch on the current device."""
    if (why := unavailable()) is not None:
        raise ProductionError("cuda", expected="a GPU that runs the kernels", came=why)
    loaded = ctypes.CDLL(str(build().path))
    loaded.dsv4_error.restype = ctypes.c_char_p
    return loaded


def _run(command: list[str], what: str) -> str:
    """Both streams of a compiler run; its first error line if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ProductionError("cuda", expected=f"{what} to run", came=str(error)) from error
    text = done.stdout + done.stderr
    if done.returncode:
        line = next((line for line in text.splitlines() if "error" in line.lower()), text.strip()[:200] or "no output")
        raise ProductionError(f"cuda: {what}", expected="exit 0", came=f"exit {done.returncode}: {line}")
    return text
