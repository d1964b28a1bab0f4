"""How a checkpoint stores each entry of the manifest: under which names, in which format.

The manifest is written in DeepSeek's names; a checkpoint may use any of four families of names, and stores each linear
in any of five formats. The names say which family it is, the dtype of a weight says which format: config.json is not
asked, because conversions leave its quantization_config behind. Every header must then be one that the manifest
demands, with its dtype and shape, except the draft module's (``mtp.*``), which is set aside.

    deepseek    layers.3.attn.wq_a.weight                  as released, and ModelOpt's exports
    saved       model.layers.3.attn.wq_a.weight            what transformers' save_pretrained writes
    stacked     model.layers.3.self_attn.q_a_proj.weight   a state dict; experts.gate_up_proj [E, 2F, H]
    single      as stacked, experts.7.gate_proj.weight     llm-compressor; transformers loads random experts from it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.types import UsageError
from reference import formats, nvfp4
from reference.geometry import Geometry
from reference.manifest import Entry, entries
from reference.shards import INDEX, Header, more, shown

#: the next-token-prediction block: in the checkpoint, not in the Hugging Face model
ASIDE = "mtp."
FLOATS = ("BF16", "F32")
SCALES = ("F8_E8M0", "F32", "BF16")
#: companions that an FP8 weight may have: DeepSeek's, transformers', compressed-tensors'
FP8_SCALES = ("scale", "weight_scale_inv", "weight_scale")
HALVES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True)
class Storage:
    """Where one entry's value is: ``form`` and tensor names by role; ``rows`` of expert ``entry.expert`` if stacked."""

    form: str  # float, table, fp8, mxfp4, nvfp4, nvfp4-divided
    names: Mapping[str, str]
    rows: tuple[int, int] | None = None


def family_of(headers: Iterable[str]) -> str:
    """The family of names, from the first name that only one family has; ``deepseek`` if there is none."""
    single = False
    for name in headers:
        if name.startswith("layers."):
            return "deepseek"
        if name.endswith(".mlp.experts.gate_up_proj"):
            return "stacked"
        if name.startswith("model.layers.") and (".attn." in name or ".ffn." in name):
            return "saved"
        single = single or ".mlp.experts." in name
    return "single" if single else "deepseek"


def written(entry: Entry, family: str) -> tuple[str, ...]:
    """What an entry may be called in a family, most usual first. A stacked expert shares its name with the others."""
    if family == "deepseek":
        return (entry.name,)
    if family == "saved":
        return _saved(entry)
    if entry.expert is None or family == "stacked":
        return (entry.target,)
    stem, half = entry.stem.rsplit(".", 1)
    at = f"model.{stem.replace('.ffn.', '.mlp.')}"
    return f"{at}.{HALVES[half]}.weight", f"{at}.{half}.weight"


def _saved(entry: Entry) -> tuple[str, ...]:
    """transformers reverses its renames one by one, which is not the inverse of the whole (seen in 5.17 and 5.24)."""
    if entry.name == "head.weight":
        return "head.weight", "lm_head.weight", "model.head.weight"
    if entry.stage in ("embed", "hc_head"):
        return entry.target, f"model.{entry.name}"
    if entry.stage.endswith(".kv_norm"):
        return f"model.{entry.name.replace('kv_norm', 'norm')}", f"model.{entry.name}"
    return (f"model.{entry.name}",)


def match(folder: Path, geometry: Geometry, headers: Mapping[str, Header]) -> tuple[str, dict[str, Storage]]:
    """(family of names, storage by entry name). UsageError for anything missing, left over or of another kind."""
    family = family_of(headers)
    found = _Matcher(folder, geometry, headers, family)
    for entry in entries(geometry):
        found.add(entry)
    found.finish()
    return family, found.storage


class _Matcher:
    """Collects the storage of every entry, and what is missing or left over."""

    def __init__(self, folder: Path, geometry: Geometry, headers: Mapping[str, Header], family: str) -> None:
        self.folder, self.geometry, self.headers, self.family = folder, geometry, headers, family
        self.storage: dict[str, Storage] = {}
        self.left = {name for name in headers if not name.startswith(ASIDE)}
        self.missing: list[str] = []

    def add(self, entry: Entry) -> None:
        names = written(entry, self.family)
        if entry.kind == "linear" and entry.expert is not None and self.family == "stacked":
            self._stack(entry, names[0])
            return
        if entry.kind == "linear":
            packed = [f"{name.removesuffix('.weight')}.weight_packed" for name in names]
            if (name := self._first(packed)) is not None:
                self._divided(entry, name)
                return
        name = self._first(names)
        if name is None:
            self.missing.append(names[0])
            return
        dtype = self.headers[name].dtype
        if entry.kind == "linear" and dtype == "F8_E4M3":
            self._fp8(entry, name)
        elif entry.kind == "linear" and dtype in ("I8", "U8"):
            self._nibbles(entry, name)
        else:
            table = entry.kind == "table"
            words = "I64 or I32" if table else "BF16 or F32"
            if entry.kind == "linear":
                words += " or F8_E4M3, I8 (MXFP4) or U8 (packed NVFP4)"
            self._take(name, ("I64", "I32") if table else FLOATS, entry.shape, words)
            self.storage[entry.name] = Storage("table" if table else "float", {"weight": name})

    def finish(self) -> None:
        """Raise for what is missing or left over."""
        if self.missing:
            extra = sorted(self.left)
            hint = f", while {shown(extra[0])}{more(extra)} is unexpected" if extra else ""
            raise UsageError(
                f"{self.folder / INDEX}: expected {self.missing[0]}, came no such tensor{more(self.missing)}"
                f"{hint}; the checkpoint does not hold what its config.json describes"
            )
        if self.left:
            names = sorted(self.left)
            header = self.headers[names[0]]
            raise UsageError(
                f"{self.folder / header.shard}: {shown(names[0])}: expected no such tensor for this config.json, came "
                f"{header.dtype} {list(header.shape)}{more(names)}; correct config.json or the export"
            )

    def _first(self, names: Iterable[str]) -> str | None:
        return next((name for name in names if name in self.headers), None)

    def _take(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...], words: str = "") -> None:
        """Use up a tensor, of one of these dtypes and of this shape; note it if it is not there."""
        header = self.headers.get(name)
        self.left.discard(name)
        if header is None:
            self.missing.append(name)
            return
        where = self.folder / header.shard
        if header.dtype not in dtypes:
            raise UsageError(
                f"{where}: {name}: expected dtype {words or ' or '.join(dtypes)}, came {header.dtype}; export the "
                "checkpoint again"
            )
        if header.shape != shape:
            raise UsageError(
                f"{where}: {name}: expected shape {list(shape)} from config.json, came {list(header.shape)}; correct "
                "config.json or the export"
            )

    def _stack(self, entry: Entry, name: str) -> None:
        g = self.geometry
        down = entry.leaf == "down_proj.weight"
        shape = (g.n_routed_experts, *entry.shape) if down else (g.n_routed_experts, 2 * entry.shape[0], entry.shape[1])
        if name not in self.headers:
            if name not in self.missing:
                self.missing.append(name)
            return
        self._take(name, FLOATS, shape)
        first = entry.shape[0] if entry.leaf == "up_proj.weight" else 0
        self.storage[entry.name] = Storage("float", {"weight": name}, (first, first + entry.shape[0]))

    def _fp8(self, entry: Entry, name: str) -> None:
        stem = name.removesuffix("weight")
        scale = self._first(stem + leaf for leaf in FP8_SCALES) or f"{stem}scale"
        self._take(name, ("F8_E4M3",), entry.shape)
        self._take(scale, SCALES, (-(-entry.shape[0] // formats.TILE), -(-entry.shape[1] // formats.TILE)))
        self.storage[entry.name] = Storage("fp8", {"weight": name, "scale": scale})

    def _nibbles(self, entry: Entry, name: str) -> None:
        """MXFP4 has one companion, ``.scale``; NVFP4 has ``.weight_scale`` and ``.weight_scale_2``."""
        stem = name.removesuffix("weight")
        rows, columns = self._width(entry, name, formats.MX_BLOCK if f"{stem}scale" in self.headers else nvfp4.BLOCK)
        if f"{stem}scale" in self.headers:
            self._take(name, ("I8", "U8"), (rows, columns // 2))
            self._take(f"{stem}scale", ("F8_E8M0",), (rows, columns // formats.MX_BLOCK))
            self.storage[entry.name] = Storage("mxfp4", {"weight": name, "scale": f"{stem}scale"})
            return
        self._take(name, ("U8",), (rows, columns // 2))
        self._take(f"{stem}weight_scale", ("F8_E4M3",), (rows, columns // nvfp4.BLOCK))
        self._take(f"{stem}weight_scale_2", ("F32",), ())
        if f"{stem}input_scale" in self.headers:  # for activations: nothing here uses it
            self._take(f"{stem}input_scale", ("F32",), ())
        scales = {"scale": f"{stem}weight_scale", "scale_2": f"{stem}weight_scale_2"}
        self.storage[entry.name] = Storage("nvfp4", {"weight": name, **scales})

    def _divided(self, entry: Entry, name: str) -> None:
        stem = name.removesuffix("weight_packed")
        rows, columns = self._width(entry, name, nvfp4.BLOCK)
        self._take(name, ("U8",), (rows, columns // 2))
        self._take(f"{stem}weight_scale", ("F8_E4M3",), (rows, columns // nvfp4.BLOCK))
        self._take(f"{stem}weight_global_scale", ("F32",), (1,))
        if f"{stem}input_global_scale" in self.headers:
            self._take(f"{stem}input_global_scale", ("F32",), (1,))
        scales = {"scale": f"{stem}weight_scale", "scale_2": f"{stem}weight_global_scale"}
        self.storage[entry.name] = Storage("nvfp4-divided", {"weight": name, **scales})

    def _width(self, entry: Entry, name: str, block: int) -> tuple[int, int]:
        rows, columns = entry.shape
        if columns % block:
            raise UsageError(
                f"{self.folder}: {name}: expected a width that {block} divides for its format, came {columns}; store "
                "it as BF16"
            )
        return rows, columns
