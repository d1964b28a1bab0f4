"""The feed-forward half: router, routed experts, the shared expert and their sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from harness.types import InvalidRun
from reference import hf
from reference.net import Net
from reference.stages.base import HFStage, Port, Tensors, origin


class Router(HFStage):
    """Which experts a token goes to, and with what weight. HF: ``DeepseekV4TopKRouter`` or, in the first layers,
    ``DeepseekV4HashRouter`` (a fixed table by token id).

    x ``[B, S, d]``, input_ids ``[B, S]`` -> logits ``[B, S, E]``, weights ``[B, S, k]``, picks ``[B, S, k]`` int64 in
    topk's unsorted order. The correction bias takes part in the choice only. With ``replay`` the weights are those of
    the picks given (in ``0..E - 1``), in their order: the hash router's own forward, with the picks as its table.
    """

    def __init__(self, net: Net, layer: int) -> None:
        super().__init__(net, layer, "router")
        self.hashed = net.geometry.mlp_layer_types[layer] == "hash_moe"
        with torch.device("meta"):
            self.by_table = hf.modeling.DeepseekV4HashRouter(net.model.config).eval()
        self.by_table.__dict__["_parameters"] = self.module._parameters  # shared, so an overridden weight is seen

    @property
    def module(self) -> Any:
        assert self.layer is not None
        return self.net.layer(self.layer).mlp.gate

    @property
    def inputs(self) -> Mapping[str, str]:
        return {"x": self.wire("ffn_norm", "x"), "input_ids": "case.input_ids"}

    @property
    def outputs(self) -> Sequence[Port]:
        return [
            self.port("logits", "B S E"),
            self.port("weights", "B S k"),
            self.port("picks", "B S k", "int64", "exact" if self.hashed else "picks"),
        ]

    @property
    def points(self) -> Mapping[str, str]:
        return {"logits": "bf16", "scores": "bf16", "weights": "bf16"}

    @property
    def component(self) -> str:
        return origin(self.module)

    def compute(self, inputs: Tensors, replay: Tensors) -> dict[str, Tensor]:
        x, ids = inputs["x"], inputs["input_ids"]
        if "picks" in replay:
            # Row i of the table is the picks of token i.
            self.by_table.__dict__["_buffers"] = {"tid2eid": replay["picks"].flatten(0, 1)}
            found = self.by_table(x, torch.arange(ids.numel(), device=ids.device))
        else:
            found = self.module(x, ids) if self.hashed else self.module(x)
        logits, weights, picks = (value.view(*ids.shape, -1) for value in found)
        return {"logits": logits, "weights": weights, "picks": picks}

    def selection(self, outputs: Tensors) -> dict[str, Tensor]:
        """Score plus correction bias, ``[B, S, E]``; a hash layer chooses by no score."""
        if self.hashed:
            return {}
        gate = self.module
        return {"picks": gate.score_fn(outputs["logits"]) + gate.e_score_correction_bias}


class Experts(HFStage):
    """The routed experts. HF: ``DeepseekV4Experts`` in its eager form; the routing weight is applied after ``down``.

    x ``[B, S, d]``, weights and picks ``[B, S, k]`` -> out ``[B, S, d]`` and, per pick, gate and up ``[B, S, k, F]``
    (projections before the clamp), act ``[B, S, k, F]`` and down ``[B, S, k, d]`` (before the weight). The module
    shows none of the four: they are recomputed as it does, expert by expert, and InvalidRun is raised if their
    weighted sum is not the module's output bit for bit.
    """

    LEAVES = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")

    def __init__(self, net: Net, layer: int) -> None:
        super().__init__(net, layer, "experts")

    @property
    def module(self) -> Any:
        assert self.layer is not None
        return self.net.layer(self.layer).mlp.experts

    @property
    def inputs(self) -> Mapping[str, str]:
        routed = {name: self.wire("router", name) for name in ("weights", "picks")}
        return {"x": self.wire("ffn_norm", "x"), **routed}

    @property
    def outputs(self) -> Sequence[Port]:
        rows = [self.port(name, "B S k F") for name in ("gate", "up", "act")]
        return [*rows, self.port("down", "B S k d"), self.port("out", "B S d")]

    @property
    def points(self) -> Mapping[str, str]:
        names = ("gate", "up", "silu", "act", "down", "weighted", "sum", "out")
        return {"weight": self.weight_point("gate_proj.weight"), **dict.fromkeys(names, "bf16")}

    @property
    def component(self) -> str:
        return origin(self.module)

    def parameter(self, leaf: str, target: str) -> Tensor:
        stacked = self.net.parameter(target)  # gate above up: [E, 2F, d]; down: [E, d, F]
        size = self.net.geometry.moe_intermediate_size
        return {"gate_proj.weight": stacked[:, :size], "up_proj.weight": stacked[:, size:]}.get(leaf, stacked)

    def assemble(self, given: Tensors, now: Tensors) -> dict[str, Tensor]:
        gate, up, down = ({**now, **given}[leaf] for leaf in self.LEAVES)
        own = f"model.layers.{self.layer}.mlp.experts"
        return {f"{own}.gate_up_proj": torch.cat((gate, up), dim=1), f"{own}.down_proj": down}

    def compute(self, inputs: Tensors, replay: Tensors) -> dict[str, Tensor]:
        experts, x = self.module, inputs["x"]
        flat = x.reshape(-1, x.shape[-1])  # [B * S, d]
        picks, weights = (inputs[name].flatten(0, 1) for name in ("picks", "weights"))  # [B * S, k]
        out = experts(flat, picks, weights)
        rows: dict[str, Tensor] = {}
        total = torch.zeros_like(flat)
        for index in sorted(set(picks.flatten().tolist())):
            slot, token = torch.where((picks == index).T)  # the module's order of rows: by slot, then by token
            both = F.linear(flat[token], experts.gate_up_proj[index])
            gate, up = both.chunk(2, dim=-1)
            act = experts._apply_gate(both)
            down = F.linear(act, experts.down_proj[index])
            for name, value in (("gate", gate), ("up", up), ("act", act), ("down", down)):
                rows.setdefault(name, value.new_zeros((*picks.shape, value.shape[-1])))[token, slot] = value
            weighted = down * weights[token, slot, None]
            total.index_add_(0, token, weighted.to(total.dtype))
        if not torch.equal(total.nan_to_num(), out.nan_to_num()):
            raise InvalidRun(f"{self.name}: the experts recomputed one by one do not add up to the module's output")
        shape = x.shape[:2]
        return {**{name: value.view(*shape, *value.shape[1:]) for name, value in rows.items()}, "out": out.view_as(x)}


class SharedExpert(HFStage):
    """The expert that sees every token. HF: ``DeepseekV4MLP``.

    x ``[B, S, d]`` -> gate, up ``[B, S, F]`` (projections before the clamp), act ``[B, S, F]``, out ``[B, S, d]``.
    """

    def __init__(self, net: Net, layer: int) -> None:
        super().__init__(net, layer, "shared_expert")

    @property
    def module(self) -> Any:
        assert self.layer is not None
        return self.net.layer(self.layer).mlp.shared_experts

    @property
    def inputs(self) -> Mapping[str, str]:
        return {"x": self.wire("ffn_norm", "x")}

    @property
    def outputs(self) -> Sequence[Port]:
        return [*(self.port(name, "B S F") for name in ("gate", "up", "act")), self.port("out", "B S d")]

    @property
    def points(self) -> Mapping[str, str]:
        names = ("gate", "up", "silu", "act", "out")
        return {"weight": self.weight_point("gate_proj.weight"), **dict.fromkeys(names, "bf16")}

    @property
    def component(self) -> str:
        return origin(self.module)

    def compute(self, inputs: Tensors, replay: Tensors) -> dict[str, Tensor]:
        mlp, x = self.module, inputs["x"]
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        act = mlp.act_fn(gate.clamp(max=mlp.limit)) * up.clamp(min=-mlp.limit, max=mlp.limit)
        out = mlp(x)
        if not torch.equal(mlp.down_proj(act).nan_to_num(), out.nan_to_num()):
            raise InvalidRun(f"{self.name}: act recomputed from the module's parts does not give the module's output")
        return {"gate": gate, "up": up, "act": act, "out": out}


class MoeSum(HFStage):
    """Routed plus shared. HF: the last line of ``DeepseekV4SparseMoeBlock.forward``. All ``[B, S, d]``."""

    def __init__(self, net: Net, layer: int) -> None:
        super().__init__(net, layer, "moe_sum")

    @property
    def inputs(self) -> Mapping[str, str]:
        return {"routed": self.wire("experts", "out"), "shared": self.wire("shared_expert", "out")}

    @property
    def outputs(self) -> Sequence[Port]:
        return [self.port("out", "B S d")]

    @property
    def points(self) -> Mapping[str, str]:
        return {"out": "bf16"}

    @property
    def component(self) -> str:
        assert self.layer is not None
        return origin(self.net.layer(self.layer).mlp)

    def compute(self, inputs: Tensors, replay: Tensors) -> dict[str, Tensor]:
        return {"out": inputs["routed"] + inputs["shared"]}
