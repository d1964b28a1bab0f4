"""A broken checkpoint through the real command line: one clear line that names what is wrong, exit 2."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.harness.conftest import refused

TINY = Path(__file__).parents[2] / "cases" / "tiny"


Edit = Callable[[Path], Any]


def shard(edit: Callable[[dict[str, torch.Tensor]], Any], number: int = 1) -> Edit:
    """An edit of the tensors of one shard."""

    def apply(folder: Path) -> None:
        path = folder / f"model-0000{number}-of-00002.safetensors"
        tensors = load_file(path)
        edit(tensors)
        path.unlink()
        save_file(tensors, path)

    return apply


def raw(edit: Callable[[bytes], bytes]) -> Edit:
    """An edit of the bytes of the first shard."""

    def apply(folder: Path) -> None:
        path = folder / "model-00001-of-00002.safetensors"
        data = edit(path.read_bytes())
        path.unlink()
        path.write_bytes(data)

    return apply


def config(**changes: Any) -> Edit:
    def apply(folder: Path) -> None:
        path = folder / "config.json"
        data = json.loads(path.read_text()) | changes
        path.unlink()
        path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))

    return apply


def index(edit: Callable[[dict[str, str]], Any]) -> Edit:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        data = json.loads(path.read_text())
        edit(data["weight_map"])
        path.unlink()
        path.write_text(json.dumps(data))

    return apply


def overwrite(name: str, text: str | None) -> Edit:
    def apply(folder: Path) -> None:
        (folder / name).unlink()
        if text is not None:
            (folder / name).write_text(text)

    return apply


def first(tensors: dict[str, torch.Tensor], ending: str) -> str:
    return next(name for name in sorted(tensors) if name.endswith(ending))


def put(ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        name = first(tensors, ending)
        tensors[name] = change(tensors[name])

    return shard(edit)


def poisoned(scale: torch.Tensor) -> torch.Tensor:
    scale = scale.clone()
    flat = scale.flatten().view(torch.uint8) if scale.dtype == torch.float8_e4m3fn else scale.flatten()
    flat[0] = 0x7F if flat.dtype == torch.uint8 else torch.nan
    return flat.view(scale.dtype).reshape(scale.shape)


def both(*edits: Edit) -> Edit:
    return lambda folder: [edit(folder) for edit in edits]


def extra(folder: Path) -> None:
    shard(lambda t: t.update(stranger=torch.zeros(2)))(folder)
    index(lambda m: m.update(stranger="model-00001-of-00002.safetensors"))(folder)


CHECKPOINTS: dict[str, tuple[Edit, str]] = {
    "truncated shard": (raw(lambda b: b[: len(b) // 2]), "model-00001-of-00002.safetensors"),
    "truncated in the header": (raw(lambda b: b[:50]), "model-00001-of-00002.safetensors"),
    "empty shard": (raw(lambda b: b""), "model-00001-of-00002.safetensors"),
    "corrupt header": (raw(lambda b: b[:8] + b"\xff" * 64 + b[72:]), "model-00001-of-00002.safetensors"),
    "huge header": (raw(lambda b: b"\xff" * 8 + b[8:]), "model-00001-of-00002.safetensors"),
    "missing shard": (overwrite("model-00002-of-00002.safetensors", None), "model-00002-of-00002.safetensors"),
    "missing index": (overwrite("model.safetensors.index.json", None), "model.safetensors"),
    "broken index": (overwrite("model.safetensors.index.json", "{"), "model.safetensors.index.json"),
    "index of another kind": (overwrite("model.safetensors.index.json", "[]"), "model.safetensors.index.json"),
    "missing config": (overwrite("config.json", None), "config.json"),
    "broken config": (overwrite("config.json", "{"), "config.json"),
    "config of another kind": (overwrite("config.json", "[1]"), "config.json"),
    "missing tensor": (shard(lambda t: t.pop(first(t, "weight_scale_2"))), "weight_scale_2"),
    "missing tensor, not in the index either": (
        both(shard(lambda t: t.pop("embed.weight")), index(lambda m: m.pop("embed.weight"))),
        "embed.weight",
    ),
    "extra tensor": (extra, "stranger"),
    "extra tensor that the index does not know": (shard(lambda t: t.update(stranger=torch.zeros(2))), "stranger"),
    "wrong shape": (put("q_norm.weight", lambda t: t[:-1].clone()), "q_norm.weight"),
    "wrong dtype": (put("weight_scale", lambda t: t.float()), "weight_scale"),
    "NaN in a block scale": (put("weight_scale", poisoned), "weight_scale"),
    "NaN in a global scale": (put("weight_scale_2", poisoned), "weight_scale_2"),
    "NaN in a norm": (put("q_norm.weight", poisoned), "q_norm.weight"),
    "another model": (config(model_type="deepseek_v41"), "deepseek_v41"),
    "an old model": (config(model_type="deepseek_v3"), "deepseek_v3"),
    "no model type": (config(model_type=None), "model_type"),
    "a negative size": (config(hidden_size=-128), "hidden_size"),
    "a size that is text": (config(num_hidden_layers="six"), "num_hidden_layers"),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_bad_checkpoint(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit, words = CHECKPOINTS[name]
    folder = tmp_path / "checkpoint"
    shutil.copytree(TINY, folder, copy_function=os.link)  # every edit makes a new file
    edit(folder)
    line = refused(capsys, "diff", "--checkpoint", str(folder), "--tokens", "3,4,5", "--layer", "0")
    assert words in line
