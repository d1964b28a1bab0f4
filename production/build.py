"""The assembled model: ``model(checkpoint)`` reads, checks and wires; ``Model.forward`` runs the stages in order."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from production.backends import backends, with_backend
from production.checkpoint import Reader, load, verify
from production.config import ModelConfig, read_config
from production.errors import ProductionError
from production.graph import assemble
from production.manifest import stage_leaves
from production.stage import Stage, require_plain_fp32
from production.steps import StepSide, steps
from production.weights import FORMS

LOGITS = "lm_head.logits"
DTYPES = {"native": "bf16", "fp32": "fp32"}
Tap = Callable[[str, Mapping[str, Tensor]], None]


def model(
    checkpoint: str | Path,
    *,
    dtype: str = "native",
    layers: Iterable[int] | None = None,
    device: str | torch.device = "cpu",
) -> Model:
    """The production side of a checkpoint folder.

    dtype: "native" stores activations in bf16, "fp32" in fp32 (weights are the checkpoint's own in both).
    layers: which layers to load, all by default. The model scope always comes along, wired as in the whole model.
    The whole checkpoint is held to the manifest either way; only the tensors of the requested layers are read.
    """
    if dtype not in DTYPES:
        raise ProductionError("dtype", expected=" or ".join(map(repr, DTYPES)), came=repr(dtype))
    where = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0", as tensors say it
    config = read_config(checkpoint)
    wanted = _layers(config, layers)
    leaves = stage_leaves(config)
    reader = Reader(checkpoint)
    try:
        formats, aside = verify(reader, leaves)

        def source(stage: str) -> tuple[dict[str, Tensor], str | None]:
            form = formats.get(stage)
            if form not in (None, *FORMS):
                return {}, form  # the registry refuses it by name
            params: dict[str, Tensor] = {}
            for leaf in leaves.get(stage, ()):
                params |= load(reader, stage, leaf, form, where)
            return params, form

        graph = assemble(config, source, wanted, dtype=DTYPES[dtype], device=where)
    finally:
        reader.close()
    for stage in graph.stages:
        _check_tables(config, stage)
    provenance = {
        "side": "production",
        "path": "portable",
        "checkpoint": str(checkpoint),
        "config_sha256": hashlib.sha256((Path(checkpoint) / "config.json").read_bytes()).hexdigest(),
        "config_keys_unread": ", ".join(config.unread) or "none",
        "tensors": f"{len(reader.headers)} ({aside} of the draft module set aside)",
        "formats": ", ".join(sorted({f"{stage.rsplit('.', 1)[-1]} {form}" for stage, form in formats.items()})),
        "bytes_read": str(reader.bytes_read),
        "dtype": dtype,
        "device": str(where),
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
    }
    return Model(config=config, stages=graph.stages, provenance=provenance, dtype=dtype, device=where, layers=wanted)


@dataclass(frozen=True)
class _Step:
    """A stage with what the assembled model does around it."""

    stage: Stage
    keep: tuple[tuple[str, str], ...]  # (output, wire) that a later stage reads
    drop: tuple[str, ...]  # wires that no later stage reads


@dataclass(repr=False)
class Model:
    """Stages in execution order, and the forward pass over them."""

    config: ModelConfig
    stages: list[Stage]
    provenance: dict[str, str]
    dtype: str
    device: torch.device
    layers: tuple[int, ...]
    _steps: list[_Step] = field(init=False, repr=False)

    def __repr__(self) -> str:
        return f"Model({self.provenance['checkpoint']}, {self.dtype}, layers {list(self.layers)}, {self.device})"

    def __post_init__(self) -> None:
        self._steps = _schedule(self.stages)

    def stage(self, name: str) -> Stage:
        """One stage by its full name."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise ProductionError("stage", expected="a stage of this model", came=repr(name))

    def backends(self, name: str) -> dict[str, str | None]:
        """Backend -> why this stage cannot use it here, None where it can."""
        return backends(self.stage(name))

    def with_backends(self, choices: Mapping[str, str]) -> Model:
        """The same model with torch, cuda or best for stages by name; one that cannot be had is an error."""
        stages = [with_backend(s, choices[s.name]) if s.name in choices else s for s in self.stages]
        kernels = [new.name for old, new in zip(self.stages, stages, strict=True) if new is not old]
        path = f"portable, {len(kernels)} stages on cuda" if kernels else "portable"
        return replace(self, stages=stages, provenance={**self.provenance, "path": path})

    def steps(self) -> StepSide:
        """The stages of a call that continues sequences, with their caches as wires."""
        return steps(self)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        lengths: Tensor | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Logits fp32 [B, S, V] of input_ids int64 [B, S].

        positions: absolute, 0..S-1 by default. lengths: valid tokens of each row of a right-padded batch, S by default;
        logits from a row's length on mean nothing. ``tap(stage, outputs)`` is called after every stage with all of its
        outputs; without one, outputs that no stage reads are not computed. A wire lives until its last reader.
        """
        require_plain_fp32("forward")
        wires = self._case(input_ids, positions, lengths)
        for step in self._steps:
            stage = step.stage
            outputs = stage.execute({arg: wires[wire] for arg, wire in stage.inputs.items()}, detail=tap is not None)
            if tap is not None:
                tap(stage.name, outputs)
            for name, wire in step.keep:
                wires[wire] = outputs[name]
            del outputs
            for wire in step.drop:
                del wires[wire]
        return wires[LOGITS]

    def _case(self, input_ids: Tensor, positions: Tensor | None, lengths: Tensor | None) -> dict[str, Tensor]:
        if len(self.layers) != self.config.num_hidden_layers:
            came = f"layers {', '.join(map(str, self.layers)) or 'none'}"
            fix = "build the model without layers= to run it forward"
            raise ProductionError("forward", expected=f"all {self.config.num_hidden_layers} layers", came=came, fix=fix)
        if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or 0 in input_ids.shape:
            came = str(list(input_ids.shape)) if isinstance(input_ids, Tensor) else type(input_ids).__name__
            raise ProductionError("forward: input_ids", expected="int64 [B, S] with B, S >= 1", came=came)
        batch, length = input_ids.shape
        if positions is None:
            positions = torch.arange(length, device=self.device).expand(batch, -1)
        if lengths is None:
            lengths = torch.full((batch,), length, dtype=torch.int64, device=self.device)
        for name, tensor, shape in (("positions", positions, (batch, length)), ("lengths", lengths, (batch,))):
            if tuple(tensor.shape) != shape:
                raise ProductionError(f"forward: {name}", expected=str(list(shape)), came=str(list(tensor.shape)))
        return {"case.input_ids": input_ids, "case.positions": positions, "case.lengths": lengths}


def _layers(config: ModelConfig, layers: Iterable[int] | None) -> tuple[int, ...]:
    count = config.num_hidden_layers
    wanted = tuple(range(count)) if layers is None else tuple(sorted(set(layers)))
    if bad := [layer for layer in wanted if layer not in range(count)]:
        raise ProductionError("layers", expected=f"layers 0..{count - 1}", came=str(bad[0]))
    return wanted


def _schedule(stages: list[Stage]) -> list[_Step]:
    """Which outputs to keep after each stage, and which wires have had their last reader."""
    last_reader = {wire: i for i, stage in enumerate(stages) for wire in stage.inputs.values()}
    last_reader[LOGITS] = len(stages)
    steps = []
    for i, stage in enumerate(stages):
        keep = tuple((out.name, out.wire) for out in stage.outputs if out.wire in last_reader)
        drop = tuple(wire for wire in dict.fromkeys(stage.inputs.values()) if last_reader[wire] == i)
        steps.append(_Step(stage, keep, drop))
    return steps


def _check_tables(config: ModelConfig, stage: Stage) -> None:
    table = stage.params.get("tid2eid")
    if table is not None and not 0 <= int(table.min()) <= int(table.max()) < config.n_routed_experts:
        came = f"{int(table.min())}..{int(table.max())}"
        raise ProductionError(f"{stage.name}: tid2eid", expected=f"ids 0..{config.n_routed_experts - 1}", came=came)
