"""The one place that imports transformers: the DeepseekV4 classes and how a model is built from decoded tensors.

Only the model's own modules are imported, never the Auto classes. Nothing here patches them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import __version__, cache_utils, masking_utils
from transformers.models.deepseek_v4 import configuration_deepseek_v4, modeling_deepseek_v4

from harness.types import UsageError

modeling: Any = modeling_deepseek_v4
masking: Any = masking_utils
caching: Any = cache_utils
EAGER = "eager"
OLDEST = (5, 20)  # transformers before it computes DeepSeek-V4 otherwise


def require_version(found: str = __version__) -> None:
    """UsageError where the installed transformers is too old to be the reference."""
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UsageError(f"transformers: expected {oldest} or later, came {found}; pip install -U transformers")


def configuration(keywords: Mapping[str, Any]) -> Any:
    """A DeepseekV4Config with eager attention and eager experts pinned (both default to something else)."""
    pinned = {"attn_implementation": EAGER, "experts_implementation": EAGER, "use_cache": False}
    return configuration_deepseek_v4.DeepseekV4Config(**{**keywords, **pinned})


def dynamic_cache(config: Any) -> Any:
    """An empty cache with a layer of the right kind for each layer of the model."""
    return caching.DynamicCache(config=config)


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword arguments that make a model's forward use ``cache``: its name changed in 5.24."""
    parameters = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    name = next(n for n in ("cache", "past_key_values") if n in parameters)
    return {name: cache, "use_cache": True}


def skeleton(keywords: Mapping[str, Any]) -> Any:
    """A DeepseekV4ForCausalLM whose parameters take no memory yet (meta device)."""
    with torch.device("meta"):
        return modeling.DeepseekV4ForCausalLM(configuration(keywords))


def stored_dtypes(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype that ``from_pretrained(dtype=...)`` gives each entry of the state dict.

    In bfloat16 it keeps norms, sinks, hyper-connections, position biases and the router's correction bias in float32;
    ``model.to(bfloat16)`` would not, and gives other logits. Integer tables keep their type.
    """
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    kept = re.compile("|".join(p.replace("*", ".*") for p in sorted(strict)) or r"(?!)")
    plan: dict[str, torch.dtype] = {}
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            plan[name] = tensor.dtype
        elif dtype is torch.bfloat16 and kept.search(name):
            plan[name] = torch.float32
        else:
            plan[name] = dtype
    return plan


def fill(model: Any, state: Mapping[str, Tensor], device: str) -> Any:
    """Give a skeleton its tensors, in place; every name must be there, with its shape, and no other.

    The rotary frequencies are no part of a state dict: each rotary module gets those that a fresh one computes.
    Returns the model in eval mode on ``device``, without gradients.
    """
    model.load_state_dict(state, strict=True, assign=True)
    rotary = modeling.DeepseekV4RotaryEmbedding
    for module in list(model.modules()):
        if isinstance(module, rotary):
            for name, value in rotary(model.config).named_buffers():
                module.register_buffer(name, value, persistent=False)
    left = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if left:
        raise RuntimeError(f"no value for {left[:4]}")  # a transformers with buffers that this code does not know
    return model.to(device).eval().requires_grad_(False)


def set_frequencies(model: nn.Module, table: Mapping[str, Tensor]) -> None:
    """Overwrite the inverse frequencies of every rotary module; ``table`` is keyed ``main`` and ``compress``."""
    for module in model.modules():
        if isinstance(module, modeling.DeepseekV4RotaryEmbedding):
            for name, value in table.items():
                for buffer in (f"{name}_inv_freq", f"{name}_original_inv_freq"):
                    old = module.get_buffer(buffer)
                    module.register_buffer(buffer, value.to(old.device), persistent=False)
