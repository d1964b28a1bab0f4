"""Checks of stored values: scales, tables and parameters that a forward pass could not mean anything with.

Everything is read in pieces of at most 64 MB.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from cases.checkpoints.findings import Findings, effect_of
from cases.checkpoints.folder import Folder
from cases.checkpoints.manifest import Part
from cases.checkpoints.model import Model

#: share of an NVFP4 matrix' blocks (and of FP8 codes) at the largest value from which scales count as saturated.
#: The usual recipe puts the one block with the matrix' maximum there.
SATURATED = 0.05
#: a global scale of real weights is 1e-6 .. 1e-2, its reciprocal 1e2 .. 1e6
SWAP = 1.0
#: the same for activations, whose largest values are less certain
INPUT_SWAP = 10.0
E4M3_NAN, E4M3_TOP, E8M0_NAN, E8M0_TOP = 0x7F, 0x7E, 255, 254

Stored = Mapping[str, str]  # role -> name on disk


class Checks:
    """Checks parts one by one; a layer's experts are also compared with each other."""

    def __init__(self, folder: Folder, model: Model, findings: Findings) -> None:
        self.folder, self.model, self.found = folder, model, findings
        self._scales: dict[
            str, tuple[str, float, float | None]
        ] = {}  # stem -> (name, scale_2, input scale) of gate, up
        self._bytes: dict[tuple[int | None, str, int], str] = {}

    def check(self, part: Part, form: str, stored: Stored) -> None:
        """Check one part whose tensors are all there and whole."""
        if part.plain == "I64":
            self._table(part, stored["weight"])
        elif "fused" in stored or form == "plain":
            self._floats(part, stored.get("fused") or stored["weight"])
        elif form == "fp8":
            self._fp8(part, stored)
        else:
            self._four_bit(part, form, stored)

    def _say(self, kind: str, part: Part, name: str, text: str, effect: str | None = None) -> None:
        # One entry for all tensors of a kind in a family: a checkpoint has 33,000 expert matrices.
        self.found.add(kind, name, text, effect or effect_of(part), f"{part.family} {part.leaf}")

    def _floats(self, part: Part, name: str) -> None:
        total = bad = 0
        low, high = float("inf"), float("-inf")
        for chunk in self.folder.chunks(name):
            total += chunk.numel()
            least, most = (float(v) for v in torch.aminmax(chunk))  # one pass; NaN if there is one
            if not (math.isfinite(least) and math.isfinite(most)):
                bad += int((~torch.isfinite(chunk)).sum())
            low, high = min(low, least), max(high, most)
        if bad:
            self._say("not finite", part, name, f"expected finite values, came {bad} of {total} NaN or infinite", _NAN)
        elif low == high == 0:
            self._say("all zero", part, name, f"expected trained values, came {total} zeros")
        elif low == high == 1 and total > 1:
            self._say("all one", part, name, f"expected trained values, came {total} ones (an initial value)")

    def _table(self, part: Part, name: str) -> None:
        experts = self.model.experts
        table = self.folder.tensor(name).to(torch.int64)
        outside = int(((table < 0) | (table >= experts)).sum())
        if outside:
            came = f"{outside} entries in {int(table.min())}..{int(table.max())}"
            self._say("expert out of range", part, name, f"expected ids in 0..{experts - 1}, came {came}", _OUT)
            return
        if not bool(table.any()):
            self._say("all zero", part, name, f"expected expert ids, came {table.numel()} zeros")
            return
        ordered = table.sort(-1).values
        twice = int((ordered[:, 1:] == ordered[:, :-1]).any(-1).sum())
        if twice:
            text = f"expected {table.shape[1]} different experts a token, came {twice} tokens with one twice"
            self._say("expert twice", part, name, text, "that expert is weighted twice for these tokens")
            return
        never = experts - int(torch.unique(table).numel())
        if never and table.numel() >= 8 * experts:
            text = f"expected every expert to serve some token, came {never} of {experts} that serve none"
            self._say("expert never used", part, name, text)

    def _fp8(self, part: Part, stored: Stored) -> None:
        counts = sum((_histogram(chunk) for chunk in self.folder.chunks(stored["weight"])), torch.zeros(256).long())
        total, name = int(counts.sum()), stored["weight"]
        nans, zeros, top = (int(counts[code] + counts[code | 0x80]) for code in (E4M3_NAN, 0, E4M3_TOP))
        if nans:
            self._say("not finite", part, name, f"expected E4M3 numbers, came {nans} of {total} NaN codes", _NAN)
        if zeros == total:
            self._say("all zero", part, name, f"expected trained values, came {total} zeros")
        if top > SATURATED * total:
            text = f"expected at most {SATURATED:.0%} of the codes at 448, came {top / total:.0%}"
            self._say("saturated", part, name, text, "large weights are cut off: their scale is too small")
        self._scale_values(part, stored["scale"])

    def _scale_values(self, part: Part, name: str) -> None:
        """Block scales of FP8 (any dtype) and MXFP4 (E8M0)."""
        scale = self.folder.tensor(name)
        if scale.dtype == torch.float8_e8m0fnu:
            byte = scale.view(torch.uint8)
            self._codes(part, name, "NaN scale", byte, {E8M0_NAN}, "bytes other than 255", _NAN)
            self._codes(part, name, "saturated scale", byte, {E8M0_TOP}, "exponents below 127", _HUGE)
            if part.linear != "routed experts" or not self._empty_blocks(part, name, byte):
                self._codes(part, name, "zero scale", byte, {0}, "exponents above -127", _VANISH)
            return
        value = scale.float()
        self._count(part, name, "NaN scale", ~torch.isfinite(value), "finite scales", _NAN)
        self._count(part, name, "zero scale", value == 0, "scales above zero", _VANISH)
        self._count(part, name, "negative scale", value < 0, "scales above zero", "the block's weights change sign")

    def _empty_blocks(self, part: Part, name: str, byte: Tensor) -> bool:
        """Whether every zero E8M0 scale belongs to a block without weights (a packer may write anything there)."""
        rows = (byte == 0).any(-1).nonzero().flatten().tolist()
        weight = f"{name.removesuffix('.scale')}.weight"
        for row in rows:
            codes = self.folder.rows(weight, row, 1).view(torch.uint8) & 0x77
            used = codes.view(-1, 16).any(-1)
            if bool((used & (byte[row] == 0)).any()):
                return False
        return bool(rows)

    def _four_bit(self, part: Part, form: str, stored: Stored) -> None:
        self._packed(part, stored["weight"])
        if form == "mxfp4":
            self._scale_values(part, stored["scale"])
            return
        name, scale = stored["scale"], self.folder.tensor(stored["scale"]).view(torch.uint8)
        signed = set(range(0x81, 0xFF))
        self._codes(part, name, "NaN scale", scale, {E4M3_NAN, E4M3_NAN | 0x80}, "E4M3 numbers", _NAN)
        self._codes(part, name, "zero scale", scale, {0, 0x80}, "scales above zero", _VANISH)
        self._codes(part, name, "negative scale", scale, signed, "scales above zero", "the block changes sign")
        top = int(_histogram(scale)[E4M3_TOP])
        if top > max(1.0, SATURATED * scale.numel()):
            text = f"expected about one block of {scale.numel()} at 448, came {top}"
            self._say("saturated scale", part, stored["scale"], text, "large weights are cut off by the global scale")
        self._global(part, form, stored)

    def _packed(self, part: Part, name: str) -> None:
        sum_, any_set = 0, False
        for chunk in self.folder.chunks(name):
            data = chunk.view(torch.uint8)
            any_set = any_set or bool((data[:4096] & 0x77).any()) or bool((data & 0x77).any())
            sum_ = zlib.crc32(data.numpy(), sum_)
        if not any_set:
            self._say("all zero", part, name, "expected trained values, came zeros only")
        elif part.linear == "routed experts":
            first = self._bytes.setdefault((part.layer, part.leaf, sum_), name)
            if first != name:
                text = f"expected weights of its own, came the same bytes as {first}"
                self._say("same expert twice", part, name, text, "two experts answer alike: one was lost in the export")

    def _global(self, part: Part, form: str, stored: Stored) -> None:
        """The scale of the whole matrix, the activation scale, and gate against up."""
        reciprocal, name = form == "nvfp4-ct", stored["scale_2"]
        value = float(self.folder.tensor(name).float().flatten()[0])
        if not 0 < value < float("inf"):  # NaN too
            word = "zero scale" if value == 0 else "NaN scale" if value != value else "bad scale"
            self._say(word, part, name, f"expected a finite scale above zero, came {value}", _MATRIX)
            return
        if (value < SWAP) if reciprocal else (value > SWAP):
            wanted = "448 * 6 / amax (1e2 to 1e6)" if reciprocal else "amax / (448 * 6) (1e-6 to 1e-2)"
            text = f"expected {wanted}, came {value:.4g}, which looks like the reciprocal"
            self._say("reciprocal scale", part, name, text, f"every weight of the matrix is off by {value**-2:.3g}")
        given = self._input(part, reciprocal, name, stored.get("input_scale"))
        self._pair(part, name, value, given, stored.get("input_scale", name))

    def _input(self, part: Part, reciprocal: bool, beside: str, name: str | None) -> float | None:
        if name is None:
            leaf = "input_global_scale" if reciprocal else "input_scale"
            missing = f"{beside.rsplit('.', 1)[0]}.{leaf}"
            self._say(
                "input scale missing", part, missing, "expected a calibrated scale, came none (weights only)", _W4A4
            )
            return None
        value = float(self.folder.tensor(name).float().flatten()[0])
        if not 0 < value < float("inf"):
            self._say("bad input scale", part, name, f"expected a finite scale above zero, came {value}", _W4A4_BAD)
        elif value == 1.0:
            text = "expected a calibrated scale, came exactly 1.0 (calibration was skipped)"
            self._say("input scale 1.0", part, name, text, _W4A4_ONE)
        elif (value < 1 / INPUT_SWAP) if reciprocal else (value > INPUT_SWAP):
            text = f"expected {'448 * 6 / amax' if reciprocal else 'amax / (448 * 6)'}, came {value:.4g}"
            self._say("reciprocal input scale", part, name, f"{text}, which looks like the reciprocal", _W4A4_BAD)
        return value

    def _pair(self, part: Part, name: str, value: float, given: float | None, input_name: str) -> None:
        """gate and up share one global scale, because a fused GEMM has one; likewise their input scale."""
        partner = {"w1": "w3", "w3": "w1"}.get(part.leaf)
        if partner is None:
            return
        stem = part.stem.removesuffix(part.leaf)
        other = self._scales.pop(stem + partner, None)
        if other is None:
            self._scales[part.stem] = (name, value, given)
            return
        other_name, other_value, other_given = other
        if value != other_value:
            text = (
                f"expected the scale of {other_name}, {other_value:.6g}, came {value:.6g} ({value / other_value:.4g} x)"
            )
            effect = "a fused gate and up GEMM has one scale: the other half is off by that factor"
            self._say("gate and up scales differ", part, name, text, effect)
        elif None not in (given, other_given) and given != other_given:
            text = f"expected one input scale for gate and up, came {other_given:.6g} and {given:.6g}"
            self._say("gate and up input scales differ", part, input_name, text, _W4A4_BAD)

    def _codes(self, part: Part, name: str, kind: str, code: Tensor, bad: set[int], expected: str, effect: str) -> None:
        """As ``_count`` for codes of one byte: looked for one by one only where a histogram has some."""
        if int(_histogram(code)[sorted(bad)].sum()):
            table = torch.zeros(256, dtype=torch.bool)
            table[sorted(bad)] = True
            self._count(part, name, kind, table[code.int()], expected, effect)

    def _count(self, part: Part, name: str, kind: str, bad: Tensor, expected: str, effect: str) -> None:
        count = int(bad.sum())
        if count:
            where = bad.nonzero()[0].tolist()
            self._say(
                kind, part, name, f"expected {expected}, came {count} of {bad.numel()} (first at {where})", effect
            )


def _histogram(code: Tensor) -> Tensor:
    """How often each of the 256 codes of a one-byte dtype occurs."""
    return torch.bincount(code.contiguous().view(-1).view(torch.uint8), minlength=256)


_NAN = "NaN in this layer's output and in every later one"
_OUT = "an access outside the experts: a crash, or the weights of something else"
_HUGE = "weights of about 1e38: infinities in this layer's output"
_VANISH = "the block's weights vanish"
_MATRIX = "the whole matrix vanishes or becomes NaN"
_W4A4 = "none with 16-bit activations; with 4-bit activations there is nothing to quantise by"
_W4A4_ONE = "none with 16-bit activations; with 4-bit activations small ones round to zero"
_W4A4_BAD = "none with 16-bit activations; with 4-bit activations they saturate or vanish"
