"""Convert a checkpoint from any layout into any other, one matrix in memory at a time.

A weight is carried over without a rounding wherever the target's format can hold it (MXFP4 into NVFP4 by the lossless
cast, the two NVFP4 flavours into each other up to their global scale, every 4- and 8-bit format with power-of-two
scales into BF16); else it is decoded exactly and encoded again with the target's recipe. What was written is decoded
and compared, so the report says what happened rather than what should have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cases.checkpoints import formats
from cases.checkpoints.folder import DTYPES, Folder, open_folder
from cases.checkpoints.layout import Layout, detect, title
from cases.checkpoints.make import SHARD_BYTES, encode, fused_parts
from cases.checkpoints.manifest import Part, parts, stored_as
from cases.checkpoints.model import Model, deepseek_form, model, read_config
from cases.checkpoints.quantization import config_json, documents, read_document
from cases.checkpoints.source import Source
from cases.checkpoints.write import Planned, Writer, write_checkpoint
from harness.types import UsageError

#: files that describe the model rather than its storage, copied as they are
CARRIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass
class Outcome:
    """How one family of tensors fared. ``error`` is the largest difference over the matrix' largest value."""

    what: str
    tensors: int = 0
    exact: int = 0
    error: float = 0.0
    rms: float = 0.0

    @property
    def line(self) -> str:
        if self.exact == self.tensors:
            return f"{self.what}: exact ({self.tensors} tensors)"
        return (
            f"{self.what}: {self.exact} of {self.tensors} tensors exact; the others differ by at most {self.error:.2e} "
            f"of the largest value (RMS {self.rms:.2e} of the matrix')"
        )


@dataclass
class Conversion:
    """What a conversion did, family by family."""

    source: str
    target: str
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def compare(self, what: str, before: Tensor, after: Tensor) -> None:
        outcome = self.outcomes.setdefault(what, Outcome(what))
        outcome.tensors += 1
        if torch.equal(before, after):
            outcome.exact += 1
            return
        before, after = before.double(), after.double()
        gap, top = before - after, float(before.abs().max())
        outcome.error = max(outcome.error, float(gap.abs().max()) / top if top else 1.0)
        size = float(before.square().mean().sqrt())
        outcome.rms = max(outcome.rms, float(gap.square().mean().sqrt()) / size if size else 1.0)

    def copied(self, what: str) -> None:
        outcome = self.outcomes.setdefault(what, Outcome(what))
        outcome.tensors += 1
        outcome.exact += 1

    def lines(self) -> list[str]:
        return [f"{self.source} -> {self.target}", *(o.line for o in self.outcomes.values()), *self.notes]

    def as_json(self) -> dict[str, Any]:
        found = [vars(outcome) for outcome in self.outcomes.values()]
        return {"source": self.source, "target": self.target, "families": found, "notes": self.notes}


def convert(path: Path, target: Path, layout: Layout, shard_bytes: int = SHARD_BYTES) -> Conversion:
    """Write ``target`` as ``path`` in ``layout``. UsageError for a source that is not whole or a bad target."""
    config = read_config(path)
    sizes = model(config, str(path / "config.json"))
    folder = open_folder(path)
    if folder.problems:
        first = folder.problems[0]
        raise UsageError(f"{path}: expected a whole checkpoint, came {first.where}: {first.text}; verify it first")
    found = detect(folder.dtypes())
    if found is None:
        raise UsageError(f"{path}: expected tensors of DeepSeek-V4 layers, came none; give a V4 checkpoint")
    source = Source(folder, sizes, found)
    report = Conversion(title(found), title(layout))
    keep_draft = _draft(folder, layout, report)
    own = {**deepseek_form(config), "num_nextn_predict_layers": sizes.draft if keep_draft else 0}
    if not keep_draft:
        own["compress_ratios"] = own["compress_ratios"][: sizes.layers]
    work = _Work(source, layout, sizes, report)
    groups = [planned for part in parts(sizes) if (planned := work.plan(part))]
    drafts = sorted(name for name in folder.where if name.startswith("mtp.")) if keep_draft else []
    groups += [[Planned(name, folder.stored(name).dtype, folder.stored(name).shape)] for name in drafts]

    def produce(writer: Writer) -> None:
        for part in parts(sizes):
            work.put(writer, part)
        for name in drafts:
            for chunk in folder.chunks(name):
                writer.put(name, chunk)

    carried = {name: found for name in CARRIED if (found := read_document(path / name)) is not None}
    documented = {**documents(layout), **carried, "config.json": config_json(own, layout)}
    write_checkpoint(target, groups, produce, documented, shard_bytes)
    if work.uncalibrated:
        report.notes.append(
            f"input scales: {work.uncalibrated} written as 1.0, the source has none; calibrate before 4-bit activations"
        )
    return report


def _draft(folder: Folder, layout: Layout, report: Conversion) -> bool:
    count = sum(name.startswith("mtp.") for name in folder.where)
    if count and not layout.drafts:
        report.notes.append(f"draft block: {count} tensors of mtp.* dropped, {report.target} has no place for them")
    elif count:
        report.notes.append(f"draft block: {count} tensors of mtp.* copied as they are")
    return bool(count) and layout.drafts


class _Work:
    """Plans and writes the parts of a target."""

    def __init__(self, source: Source, layout: Layout, sizes: Model, report: Conversion) -> None:
        self.source, self.layout, self.sizes, self.report = source, layout, sizes, report
        self.uncalibrated = 0

    def plan(self, part: Part) -> list[Planned]:
        planned = []
        for spec in stored_as(part, self.sizes, self.layout):
            dtype = spec.dtypes[0]
            if not part.linear:
                dtype = self.source.dtype(part)  # norms, sinks, tables: as precise as they came
            planned.append(Planned(spec.name, dtype, spec.shape))
        return planned

    def put(self, writer: Writer, part: Part) -> None:
        specs = {spec.role: spec.name for spec in stored_as(part, self.sizes, self.layout)}
        if not specs:
            return
        if "fused" in specs:
            for piece in fused_parts(part, self.sizes):
                writer.put(specs["fused"], self._plain(piece, torch.bfloat16))
            return
        form = self.layout.form(part.linear)
        if form == "plain" and not part.linear:
            for chunk in self.source.chunks(part):
                writer.put(specs["weight"], chunk)
            self.report.copied(f"{part.family}: copied")
            return
        if form == "plain":
            writer.put(specs["weight"], self._plain(part, torch.bfloat16))
            return
        stored = self._quantised(part, form)
        if "input_scale" in specs:
            stored["input_scale"] = self._input_scale(part, form)
        for role, tensor in stored.items():
            writer.put(specs[role], tensor)

    def _what(self, part: Part, form: str) -> str:
        return f"{part.linear}: {self.source.form(part)} -> {form}"

    def _plain(self, part: Part, dtype: torch.dtype) -> Tensor:
        before = self.source.values(part)
        after = before.to(dtype)
        self.report.compare(self._what(part, str(dtype).removeprefix("torch.")), before, after.double())
        return after

    def _quantised(self, part: Part, form: str) -> dict[str, Tensor]:
        before = self.source.values(part)
        stored = self._without_rounding(part, form)
        if stored is None:
            w = before.float()
            amax = self._amax(part, form, before)
            stored = encode(part, form, w, amax, self.layout)
        self.report.compare(self._what(part, form), before, _decode(form, stored))
        return stored

    def _without_rounding(self, part: Part, form: str) -> dict[str, Tensor] | None:
        """The target's tensors where the source's codes can be kept, or None."""
        before = self.source.form(part)
        given = {} if before == "plain" else self.source.stored(part)
        if before == form == "fp8":
            return _fp8_scales(given, self.layout.fp8_scale)
        if before == form:
            return {role: given[role] for role in ("weight", "scale", "scale_2") if role in given}
        if before == "mxfp4" and form in ("nvfp4", "nvfp4-ct"):
            cast = formats.cast_mxfp4_to_nvfp4(given["weight"], given["scale"], self._top(part, given))
            if cast is None:
                return None
            scale_2 = cast.scale_2 if form == "nvfp4" else (1.0 / cast.scale_2).reshape(1)
            return {"weight": cast.weight, "scale": cast.scale, "scale_2": scale_2}
        if before in ("nvfp4", "nvfp4-ct") and form == "mxfp4":
            back = formats.cast_nvfp4_to_mxfp4(given["weight"], given["scale"], given["scale_2"], before == "nvfp4-ct")
            return None if back is None else {"weight": back[0], "scale": back[1]}
        if {before, form} == {"nvfp4", "nvfp4-ct"}:
            flipped = 1.0 / given["scale_2"].float()
            shape = (1,) if form == "nvfp4-ct" else ()
            return {"weight": given["weight"], "scale": given["scale"], "scale_2": flipped.reshape(shape)}
        return None

    def _top(self, part: Part, given: Mapping[str, Tensor]) -> int:
        """The largest MXFP4 exponent of what shares the global scale: gate and up of one expert."""
        partner = self.source.partner(part)
        scales = [given["scale"]] + ([self.source.stored(partner)["scale"]] if partner else [])
        return max(int(scale.view(torch.uint8).max()) for scale in scales) - formats.BIAS

    def _amax(self, part: Part, form: str, before: Tensor) -> Tensor:
        if "nvfp4" not in form:
            return torch.ones(())
        partner = self.source.partner(part)
        top = before.abs().max()
        if partner:
            top = torch.maximum(top, self.source.values(partner).abs().max())
        # An all-zero matrix has no scale of its own; any will do, but a zero would divide by zero.
        return torch.where(top == 0, 1.0, top).float()

    def _input_scale(self, part: Part, form: str) -> Tensor:
        given = self.source.input_scale(part)  # in ModelOpt's convention
        if given is None:
            self.uncalibrated += 1
            given = torch.ones(())
        return (1.0 / given).reshape(1) if form == "nvfp4-ct" else given.reshape(())


def _fp8_scales(given: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor] | None:
    """FP8 codes with their scales in another dtype, where that holds them exactly."""
    value = formats.scale_values(given["scale"])
    if dtype == "F8_E8M0":
        mantissa, exponent = torch.frexp(value)
        scale = formats.e8m0(exponent - 1) if bool((mantissa == 0.5).all()) else None
    else:
        scale = value.to(DTYPES[dtype])
    if scale is None or not torch.equal(formats.scale_values(scale), value):
        return None
    return {"weight": given["weight"], "scale": scale}


def _decode(form: str, stored: Mapping[str, Tensor]) -> Tensor:
    if form == "fp8":
        return formats.decode_fp8(stored["weight"], stored["scale"])
    if form == "mxfp4":
        return formats.decode_mxfp4(stored["weight"], stored["scale"])
    return formats.decode_nvfp4(stored["weight"], stored["scale"], stored["scale_2"], form == "nvfp4-ct")
