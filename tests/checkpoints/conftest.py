"""Small checkpoints of every layout, made once a session, and tools to damage copies of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cases.checkpoints.folder import DTYPES
from cases.checkpoints.headers import read_header
from cases.checkpoints.layout import LAYOUTS, Layout
from cases.checkpoints.make import make
from cases.checkpoints.presets import TINY, cut

#: one layer of each attention type, hash and scored routers, three experts; several shards
CONFIG = cut(TINY, [0, 2, 3], experts=3)
SHARD = 1 << 20
#: combinations that have no name of their own: a base model with FP8 experts and fp32 scales, ModelOpt under HF names
OTHERS = {
    "base": Layout("deepseek", dict.fromkeys(LAYOUTS["deepseek"].forms, "fp8"), "scale", "F32"),
    "nvfp4 hf": Layout("hf-experts", LAYOUTS["modelopt-experts"].forms, "weight_scale_inv", "F32"),
    "nvfp4 saved": Layout("hf-saved", LAYOUTS["modelopt-all"].forms),
}
Made = Callable[[str], Path]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """``made(layout)``: the folder of a checkpoint of one seed in that layout; not to be changed."""
    root = tmp_path_factory.mktemp("made")

    @cache
    def build(layout: str) -> Path:
        make(root / layout, CONFIG, {**LAYOUTS, **OTHERS}[layout], seed=11, shard_bytes=SHARD)
        return root / layout

    return build


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Made:
    """``copy(layout)``: a copy that may be damaged."""

    def duplicate(layout: str) -> Path:
        return Path(shutil.copytree(made(layout), tmp_path / layout))

    return duplicate


def shard_of(folder: Path, name: str) -> Path:
    """The file that holds a tensor, found without the index."""
    for path in sorted(folder.glob("*.safetensors")):
        if name in read_header(path).tensors:
            return path
    raise KeyError(name)


def patch(folder: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Overwrite a tensor in place with ``change`` of it, of the same dtype and shape."""
    path = shard_of(folder, name)
    stored = read_header(path).tensors[name]
    with path.open("r+b") as file:
        file.seek(stored.start)
        before = torch.frombuffer(bytearray(file.read(stored.nbytes)), dtype=DTYPES[stored.dtype]).view(stored.shape)
        after = change(before.clone())
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        file.seek(stored.start)
        file.write(after.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def drop(folder: Path, names: Callable[[str], bool]) -> None:
    """Take tensors out of their shards and out of the index."""
    rewrite(folder, lambda content: {k: v for k, v in content.items() if not names(k)})


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Rewrite every shard with ``change`` of its tensors, and the index to match."""
    import json

    places: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        content = change(load_file(path))
        save_file(content, path, metadata={"format": "pt"})
        places |= dict.fromkeys(content, path.name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))


def cut_short(path: Path, count: int) -> None:
    os.truncate(path, path.stat().st_size - count)
