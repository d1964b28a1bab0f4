"""Read the parts of a checkpoint, whatever its layout: as stored, or decoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from cases.checkpoints import formats
from cases.checkpoints.folder import Folder
from cases.checkpoints.layout import Layout
from cases.checkpoints.manifest import Part, Spec, stored_as
from cases.checkpoints.model import Model
from harness.types import UsageError


class Source:
    """Parts by their logical name. Linears decode to float64; what is stored plainly keeps its dtype."""

    def __init__(self, folder: Folder, sizes: Model, layout: Layout) -> None:
        self.folder, self.sizes, self.layout = folder, sizes, layout
        self.values = lru_cache(maxsize=2)(self._values)
        self.stored = lru_cache(maxsize=2)(self._stored)

    def form(self, part: Part) -> str:
        return self.layout.form(part.linear, part.draft)

    def dtype(self, part: Part) -> str:
        """The dtype in which an unquantised part is stored."""
        spec = next(stored_as(part, self.sizes, self.layout))
        return self.folder.stored(self._name(spec)).dtype

    def chunks(self, part: Part) -> Iterator[Tensor]:
        """An unquantised part as stored, flat, a piece at a time."""
        spec = next(stored_as(part, self.sizes, self.layout))
        return self.folder.chunks(self._checked(spec, self._name(spec)))

    def partner(self, part: Part) -> Part | None:
        """Gate for up and up for gate."""
        other = {"w1": "w3", "w3": "w1"}.get(part.leaf)
        return None if other is None else replace(part, key=part.key.replace(f".{part.leaf}.", f".{other}."))

    def input_scale(self, part: Part) -> Tensor | None:
        """float32 [] in ModelOpt's convention, or None where the source has none."""
        if self.form(part) not in ("nvfp4", "nvfp4-ct"):
            return None
        spec = next(s for s in stored_as(part, self.sizes, self.layout) if s.role == "input_scale")
        if spec.names[0] not in self.folder.where:
            return None
        value = self.folder.tensor(self._name(spec)).float().reshape(())
        return 1.0 / value if self.form(part) == "nvfp4-ct" else value

    def _stored(self, part: Part) -> Mapping[str, Tensor]:
        specs = list(stored_as(part, self.sizes, self.layout))
        return {s.role: self._tensor(s) for s in specs if not (s.optional and s.names[0] not in self.folder.where)}

    def _values(self, part: Part) -> Tensor:
        form = self.form(part)
        if form == "plain":
            plain = self._expert(part) if self.layout.fused and part.expert is not None else None
            found = plain if plain is not None else self._stored(part)["weight"]
            return found.double() if part.linear else found
        stored = self.stored(part)
        if form == "fp8":
            return formats.decode_fp8(stored["weight"], stored["scale"])
        if form == "mxfp4":
            return formats.decode_mxfp4(stored["weight"], stored["scale"])
        return formats.decode_nvfp4(stored["weight"], stored["scale"], stored["scale_2"], form == "nvfp4-ct")

    def _expert(self, part: Part) -> Tensor:
        """One expert's rows of a stacked tensor."""
        assert part.expert is not None
        first = part.key.replace(f".{part.expert}.{part.leaf}.", ".0.w2." if part.leaf == "w2" else ".0.w1.")
        spec = next(stored_as(replace(part, key=first, expert=0), self.sizes, self.layout))
        whole = self.folder.rows(self._checked(spec, self._name(spec)), part.expert, 1)[0]
        if part.leaf == "w2":
            return whole
        return whole[: self.sizes.inner] if part.leaf == "w1" else whole[self.sizes.inner :]

    def _tensor(self, spec: Spec) -> Tensor:
        return self.folder.tensor(self._checked(spec, self._name(spec)))

    def _name(self, spec: Spec) -> str:
        name = next((n for n in spec.names if n in self.folder.where), None)
        if name is None:
            raise UsageError(
                f"{self.folder.path}: expected {spec.name}, came no such tensor; verify the checkpoint first"
            )
        return name

    def _checked(self, spec: Spec, name: str) -> str:
        stored = self.folder.stored(name)
        if stored.dtype not in spec.dtypes or stored.shape != spec.shape:
            raise UsageError(
                f"{self.folder.path / self.folder.where[name]}: {name}: expected {' or '.join(spec.dtypes)} "
                f"{list(spec.shape)}, came {stored.dtype} {list(stored.shape)}; verify the checkpoint first"
            )
        return name
