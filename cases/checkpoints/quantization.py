"""The JSON documents of each layout: config.json with its quantization_config, hf_quant_config.json, tokenizer.

Field by field as the programs write them that make such checkpoints (see ``cases.checkpoints.layout``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cases.checkpoints.layout import Layout
from cases.checkpoints.model import deepseek_form, hugging_face_form, model

PRODUCER = {"name": "dsv4-harness", "version": "1"}  # the layout is theirs, the program is not
_FP4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
_ROUTED = ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"]
_ALL = [
    "embed",
    "head",
    "*.ffn.gate",
    "*.attn.compressor.*",
    "*.attn.indexer.weights_proj",
    "*.attn.indexer.compressor.*",
    "mtp.*",
]


def config_json(config: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """``config`` (either form) as the layout's config.json."""
    own = deepseek_form(config)
    own.pop("quantization_config", None)
    found = own if layout.names == "deepseek" else hugging_face_form(own)
    quantization = _quantization(found, layout)
    experts = layout.forms["routed experts"]
    if experts == "plain":
        found.pop("expert_dtype", None)
    else:
        found["expert_dtype"] = "fp8" if experts == "fp8" else "fp4"
    return found if quantization is None else {**found, "quantization_config": quantization}


def documents(layout: Layout) -> dict[str, Any]:
    """Further JSON files beside config.json."""
    found: dict[str, Any] = {"generation_config.json": {"bos_token_id": 0, "eos_token_id": 1}}
    forms = set(layout.forms.values())
    if "nvfp4" in forms:
        mixed = forms != {"nvfp4"}
        quantization = {
            "quant_algo": "MIXED_PRECISION" if mixed else "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": _ROUTED if mixed else _ALL,
        }
        found["hf_quant_config.json"] = {"producer": PRODUCER, "quantization": quantization}
    return found


def _quantization(config: Mapping[str, Any], layout: Layout) -> dict[str, Any] | None:
    forms = set(layout.forms.values())
    if forms == {"plain"}:
        return None
    if "nvfp4-ct" in forms:
        return _compressed_tensors(layout)
    fp8: dict[str, Any] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    if layout.fp8_scale == "F8_E8M0":
        fp8["scale_fmt"] = "ue8m0"
    if "nvfp4" not in forms:
        return fp8
    nvfp4 = {
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "config_groups": {"group_0": {"input_activations": _FP4, "weights": _FP4, "targets": ["Linear"]}},
        "producer": PRODUCER,
    }
    if forms == {"nvfp4"}:
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", **nvfp4, "ignore": _ALL}
    layers = range(model(config).layers)
    return {
        **fp8,
        "moe_quant_algo": "NVFP4",
        "quant_algo": "MIXED_PRECISION",
        **nvfp4,
        "quantized_layers": {f"layers.{n}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16} for n in layers},
        "ignore": _ROUTED,
    }


def _compressed_tensors(layout: Layout) -> dict[str, Any]:
    def scheme(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
        return {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, **more}

    groups: dict[str, Any] = {
        "experts": {
            "format": "nvfp4-pack-quantized",
            "targets": [r"re:.*mlp\..*(gate|up|down)_proj$"],
            "weights": scheme(4, "tensor_group", group_size=16, dynamic=False, scale_dtype="torch.float8_e4m3fn"),
            "input_activations": scheme(4, "tensor_group", group_size=16, dynamic="local"),
        }
    }
    if layout.forms["attention"] == "fp8":
        groups["attention"] = {
            "format": "float-quantized",
            "targets": [
                r"re:.*attn\.(q_a_proj|q_b_proj|kv_proj|o_a_proj|o_b_proj)$",
                r"re:.*attn\.compressor\.indexer\.q_b_proj$",
            ],
            "weights": scheme(8, "block", block_structure=[128, 128], dynamic=False),
            "input_activations": scheme(8, "group", group_size=128, dynamic=True),
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if len(groups) > 1 else "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def tokenizer(vocabulary: int) -> dict[str, Any]:
    """The bundled checkpoint's tokenizer files for a model with its vocabulary; none for another."""
    bundled = Path(__file__).parent.parent / "tiny"
    config = read_document(bundled / "config.json") or {}
    if config.get("vocab_size") != vocabulary:
        return {}
    names = ("tokenizer.json", "tokenizer_config.json")
    return {name: found for name in names if (found := read_document(bundled / name)) is not None}


def read_document(path: Path) -> Any:
    """A JSON file, or None where it is missing or broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
