"""What ``verify`` reports: findings, each with the tensor it is about and what it would do to the output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from cases.checkpoints.manifest import Part

#: how many tensors of one finding are listed by name
LISTED = 20


@dataclass(frozen=True)
class Finding:
    """``tensors`` are the tensors (or files) that share the defect; ``text`` says what was expected and what came."""

    kind: str
    tensors: tuple[str, ...]
    text: str
    effect: str
    count: int = 1

    @property
    def line(self) -> str:
        more = f" (and {self.count - 1} more)" if self.count > 1 else ""
        line = f"{self.kind}: {self.tensors[0]}{more}: {self.text}. Effect: {self.effect}"
        return line if line.isprintable() else line.encode("unicode_escape").decode("ascii")  # a tensor's name is free

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "tensors": list(self.tensors)}


@dataclass
class Findings:
    """Collects findings; those of one kind, effect and family of tensors become one entry."""

    _grouped: dict[tuple[str, str, str], list[tuple[str, str]]] = field(default_factory=dict)

    def add(self, kind: str, tensor: str, text: str, effect: str, group: str = "") -> None:
        """``group`` joins findings that differ only in the tensor; the first one's text stands for all."""
        self._grouped.setdefault((kind, group or tensor, effect), []).append((tensor, text))

    def __iter__(self) -> Iterable[Finding]:  # type: ignore[override]
        for (kind, _, effect), found in self._grouped.items():
            names = tuple(name for name, _ in found[:LISTED])
            yield Finding(kind, names, found[0][1], effect, len(found))


#: what a parameter that is wrong, zero or missing does, by its last word
EFFECTS = {
    "embed": "every token starts from a wrong vector",
    "head": "the logits are wrong while every layer is right",
    "attn_sink": "without sinks the softmax mass of every head is spread over the keys: attention output too large",
    "ape": "compressed keys lose their position in the window: wrong pooling weights, wrong picks",
    "tid2eid": "tokens of the hash layers go to wrong experts",
    "bias": "the router's choice is not balanced: other experts are picked",
    "gate": "the router picks other experts with other weights",
    "weights_proj": "index scores are weighted wrongly: other compressed entries are picked",
    "wgate": "pooling weights of the compressed keys are wrong",
    "w1": "the gate of this MLP is wrong",
    "w3": "the up projection of this MLP is wrong",
    "w2": "the output of this MLP is wrong",
    "wq_a": "all queries of the layer are wrong",
    "wq_b": "all queries of the layer are wrong",
    "wkv": "all keys and values of the layer are wrong",
    "wo_a": "the attention output of the layer is wrong",
    "wo_b": "the attention output of the layer is wrong",
}


def effect_of(part: Part) -> str:
    """What a wrong part does to the output."""
    if part.draft:
        return "the draft module proposes wrong tokens (the harness sets mtp.* aside)"
    if "hc_" in part.leaf:
        return "the residual streams are mixed with wrong coefficients, in this and all later layers"
    if part.family == "norms" or part.leaf == "norm":
        return "activations keep the wrong scale per channel from here on"
    return EFFECTS.get(part.leaf, "this layer's output is wrong")
