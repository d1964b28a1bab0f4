"""The reference side's entry point: a checkpoint folder in, a side of stages out."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
import transformers
from torch import Tensor

from harness.types import Check, DType, UsageError
from reference import hf
from reference import net as nets
from reference.certify import certify
from reference.checkpoint import Checkpoint, open_checkpoint
from reference.oracle import HFOracle
from reference.stages.base import HFStage
from reference.stages.graph import stages
from reference.steps import HFSteps

#: dtype of the builder -> the model's dtype in the stage table's words
WORDS: Mapping[str, str] = {"native": "bf16", "fp32": "fp32"}


class HFReference:
    """The unmodified Hugging Face model as a list of stages (``harness.types.Reference``)."""

    def __init__(self, net: nets.Net) -> None:
        self.net = net
        self.stages: Sequence[HFStage] = stages(net)

    @cached_property
    def provenance(self) -> Mapping[str, str]:
        config = self.net.model.config
        return {
            "side": "reference",
            "model": f"{type(self.net.model).__module__}.{type(self.net.model).__qualname__}",
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "checkpoint": str(self.net.checkpoint.folder),
            "checkpoint_sha256": self.net.checkpoint.fingerprint(),
            "layers": f"{self.net.depth} of {self.net.geometry.num_hidden_layers}",
            "dtype": {"bf16": "bfloat16, float32 where from_pretrained keeps it", "fp32": "float32"}[self.net.word],
            "device": self.net.device,
            "attention": config._attn_implementation,
            "experts": config._experts_implementation,
        }

    @cached_property
    def _wide(self) -> nets.Net:
        return nets.build(self.net.checkpoint, "fp64", self.net.depth, self.net.device)

    @cached_property
    def _oracle(self) -> HFOracle:
        return HFOracle(self._wide, self.provenance)

    def oracle(self) -> HFOracle:
        """The same stages in float64; the model is decoded a second time on the first call."""
        return self._oracle

    def steps(self) -> HFSteps:
        """The stages of a call that continues sequences, with their caches as wires."""
        return HFSteps(self.net, self.provenance, self._wide)

    def certify(self, case: Mapping[str, Tensor], wires: Mapping[str, Tensor]) -> Iterable[Check]:
        """Compare composed wires, bit for bit, with what hooks capture in the model (``reference.certify``)."""
        return list(certify(self.net, case, wires))

    def logical_dtype(self) -> str:
        """``bf16`` or ``fp32``: what ``bf16`` means in docs/stages.md for this side."""
        return self.net.word


def model(
    checkpoint: Path | str, *, dtype: DType = "native", layers: Iterable[int] | None = None, device: str = "cpu"
) -> HFReference:
    """Build the reference side of a checkpoint.

    dtype:  ``native``: as ``from_pretrained(dtype=bfloat16)`` builds it; ``fp32``: everything in float32.
    layers: those that a run looks at. The model is built up to the last of them, and has a head only if that is the
            checkpoint's last. All by default.

    Raises UsageError, in one line, for a checkpoint that is not complete and sound, or for arguments out of range.
    """
    if dtype not in WORDS:
        raise UsageError(f"dtype: expected native or fp32, came {dtype!r}; choose one of them")
    hf.require_version()
    opened = open_checkpoint(checkpoint)
    return HFReference(nets.build(opened, WORDS[dtype], _depth(opened, layers), device))


def _depth(checkpoint: Checkpoint, layers: Iterable[int] | None) -> int:
    count = checkpoint.geometry.num_hidden_layers
    if layers is None:
        return count
    chosen = sorted(set(layers))
    if not chosen or chosen[0] < 0 or chosen[-1] >= count:
        raise UsageError(f"layers: expected some of 0..{count - 1}, came {chosen}; choose layers of the checkpoint")
    return chosen[-1] + 1
