"""Hold a checkpoint to its config: every tensor that it must have, no other, and values that can mean something."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases.checkpoints.checks import Checks
from cases.checkpoints.findings import Finding, Findings, effect_of
from cases.checkpoints.folder import Folder, open_folder
from cases.checkpoints.layout import Layout, detect, title
from cases.checkpoints.manifest import Part, Spec, parts, stored_as
from cases.checkpoints.model import Model, model, read_config
from harness.types import UsageError

#: what a defect of the files does
FILE_EFFECTS = {
    "dangling shard": "none if it is a leftover; else its tensors are missing",
    "unreadable shard": "the checkpoint cannot be loaded",
    "broken shard": "the checkpoint cannot be loaded, or loads other bytes than were written",
    "duplicate tensor": "one of two versions is used, and loaders differ in which",
    "duplicate shard": "tensors are loaded twice, or another shard is missing",
    "index": "loaders that follow the index miss tensors, or look for tensors that are not there",
}


@dataclass(frozen=True)
class Report:
    """What was held to what. ``checked`` counts tensors whose values were read."""

    folder: str
    layout: str
    model: Model
    tensors: int
    checked: int
    draft: str
    findings: tuple[Finding, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "folder": self.folder,
            "layout": self.layout,
            "layers": self.model.layers,
            "experts": self.model.experts,
            "tensors": self.tensors,
            "tensors_read": self.checked,
            "draft": self.draft,
            "findings": [finding.as_json() for finding in self.findings],
        }


def verify(path: Path, values: bool = True) -> Report:
    """All findings about the checkpoint in ``path``; without ``values`` only headers are read.

    Raises UsageError for a folder in which there is nothing to hold to anything: no config of a DeepSeek-V4, no
    readable shard, no tensor of a layer.
    """
    config = read_config(path)
    sizes = model(config, str(path / "config.json"))
    folder = open_folder(path)
    layout = detect(folder.dtypes())
    if layout is None:
        some = next(iter(folder.where), "none")
        raise UsageError(
            f"{path}: expected tensors of DeepSeek-V4 layers, came none ({some}, ...); give a V4 checkpoint"
        )
    found = Findings()
    for problem in folder.problems:
        found.add(problem.kind, problem.where, problem.text, FILE_EFFECTS[problem.kind])
    draft, with_draft = _draft(folder, sizes, layout)
    checks = Checks(folder, sizes, found)
    expected: set[str] = set()
    lost, gone = _lost(folder), list[_Gone]()
    checked = 0
    for part in parts(sizes, with_draft):
        specs = list(stored_as(part, sizes, layout))
        expected.update(name for spec in specs for name in spec.names)
        stored = _match(folder, part, specs, found, lost, gone)
        if stored and values:
            checks.check(part, layout.form(part.linear, part.draft), stored)
            checked += len(stored)
    _missing(gone, found)
    _unexpected(folder, expected, with_draft, found)
    return Report(str(path), title(layout), sizes, len(folder.where), checked, draft, tuple(found))


def _draft(folder: Folder, sizes: Model, layout: Layout) -> tuple[str, bool]:
    """(what was found under mtp., whether it can be held to the manifest)."""
    have = {name for name in folder.where if name.startswith("mtp.")}
    if not have:
        return "none", False
    known = {s.name for part in parts(sizes, True) if part.draft for s in stored_as(part, sizes, layout)}
    if have <= known:
        return f"{len(have)} tensors, set aside", True
    return f"{len(have)} tensors of another draft module, set aside unchecked", False


def _lost(folder: Folder) -> set[str]:
    """Tensors that the index places in a shard which cannot be read: reported once, with the shard."""
    return {name for name, shard in (folder.index or {}).items() if shard not in folder.headers}


@dataclass(frozen=True)
class _Gone:
    """Tensors of one part that are missing; ``whole``: all of them."""

    part: Part
    names: tuple[str, ...]
    whole: bool


def _missing(gone: list[_Gone], found: Findings) -> None:
    """An expert that is not there at all is one thing to say, not twelve."""
    experts: dict[str, list[_Gone]] = {}
    for each in gone:
        if each.part.expert is not None and each.whole:
            experts.setdefault(each.part.stem.rpartition(".")[0], []).append(each)
    absent = {at for at, group in experts.items() if len(group) == 3}
    for each in gone:
        at = each.part.stem.rpartition(".")[0]
        if each.part.expert is not None and at in absent:
            if each.part.leaf == "w1":
                text = f"expected {at} from config.json, came none of its tensors"
                found.add("missing", each.names[0], text, _EXPERT, f"experts of {each.part.layer}")
            continue
        for name in each.names:
            text = "expected it from config.json, came no such tensor"
            found.add("missing", name, text, effect_of(each.part), f"{each.part.family} {each.part.leaf}")


def _match(
    folder: Folder, part: Part, specs: list[Spec], found: Findings, lost: set[str], gone: list[_Gone]
) -> dict[str, str]:
    """role -> name on disk where all tensors of the part are there, whole and as expected; {} otherwise."""
    stored: dict[str, str] = {}
    good = bool(specs)
    missing: list[str] = []
    for spec in specs:
        name = next((n for n in spec.names if n in folder.where), None)
        if name is None:
            good = good and spec.optional
            if not spec.optional and lost.isdisjoint(spec.names):
                missing.append(spec.name)
            continue
        stored[spec.role] = name
        tensor = folder.stored(name)
        if tensor.dtype not in spec.dtypes:
            text = f"expected {' or '.join(spec.dtypes)}, came {tensor.dtype}"
            found.add(
                "wrong dtype", name, text, "refused, or read as other numbers", f"{part.family} {part.leaf} {spec.role}"
            )
            good = False
        if tensor.shape != spec.shape:
            text = f"expected shape {list(spec.shape)} from config.json, came {list(tensor.shape)}"
            found.add(
                "wrong shape",
                name,
                text,
                "refused, or read with other strides",
                f"{part.family} {part.leaf} {spec.role}",
            )
            good = False
        good = good and folder.readable(name)
    if missing:
        whole = len(missing) == sum(not spec.optional for spec in specs)
        gone.append(_Gone(part, tuple(missing), whole and specs[0].role != "fused"))
    return stored if good else {}


def _unexpected(folder: Folder, expected: Iterable[str], with_draft: bool, found: Findings) -> None:
    wanted = set(expected)
    for name in folder.where:
        if name in wanted or (name.startswith("mtp.") and not with_draft):
            continue
        stored = folder.stored(name)
        text = f"expected no such tensor for this config.json, came {stored.dtype} {list(stored.shape)}"
        found.add("unexpected", name, text, _EXTRA, re.sub(r"\d+", "N", name))


_EXPERT = "tokens routed to this expert get nothing, or a random answer"
_EXTRA = "ignored in silence, while what should stand in its place is missing or wrong"
