"""Read the bundled checkpoint back from its bytes into the Hugging Face model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from .arch import build, from_checkpoint
from .nvfp4 import Nvfp4, dequantize


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint as stored, over all shards of the index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    out: dict[str, Tensor] = {}
    for shard in sorted(set(index.values())):
        out |= load_file(folder / shard)
    if missing := index.keys() ^ out.keys():
        raise ValueError(f"{folder}: index and shards disagree on {sorted(missing)[:5]}")
    return out


def decoded_tensors(folder: Path) -> dict[str, Tensor]:
    """Every parameter in float32 (tid2eid in int64) under its checkpoint name."""
    stored = stored_tensors(folder)
    out: dict[str, Tensor] = {}
    for name, t in stored.items():
        if name.endswith((".weight_scale", ".weight_scale_2", ".input_scale")):
            continue
        if t.dtype == torch.uint8:
            out[name] = dequantize(Nvfp4(t, stored[f"{name}_scale"], stored[f"{name}_scale_2"]))
        else:
            out[name] = t if t.dtype == torch.int64 else t.float()
    return out


def load(folder: Path, dtype: torch.dtype = torch.bfloat16) -> DeepseekV4ForCausalLM:
    """The Hugging Face model with the checkpoint's values, in `dtype` where Hugging Face runs in `dtype`.

    Like `from_pretrained(dtype=bfloat16)`: the parameters that Hugging Face keeps in float32 stay there, which
    `.to(bfloat16)` would not do.
    """
    model = build()
    model.load_state_dict(from_checkpoint(decoded_tensors(folder), model.state_dict()))
    keep = model._keep_in_fp32_modules_strict or ()
    for name, parameter in model.named_parameters():
        if not any(part in name.split(".") for part in keep):
            parameter.data = parameter.data.to(dtype)
    return model.eval()
