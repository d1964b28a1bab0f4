"""The embedding, spread over the residual streams.

``streams[b, s, n] = weight[input_ids[b, s]]`` for each of the N streams (HF: DeepseekV4Model.forward). Nothing is
rounded: the row's bf16 values pass unchanged. input_ids int64 in 0..V-1; streams is a contiguous copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from production.component import Call, Component, Params, port, ports, rounding
from production.errors import ProductionError


@dataclass(frozen=True, kw_only=True)
class Embedding(Component):
    """Params: weight bf16 (V, d)."""

    plan = rounding(out="bf16")
    takes = ports(input_ids=port("B S", "int64"))
    gives = ports(streams=port("B S N d", role="exact"))

    hc_mult: int

    def compute(self, p: Params, call: Call, *, input_ids: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        words = p["weight"].shape[0]
        if input_ids.numel() and not 0 <= int(input_ids.min()) <= int(input_ids.max()) < words:
            came = f"{int(input_ids.min())}..{int(input_ids.max())}"
            raise ProductionError("embed: input_ids", expected=f"token ids 0..{words - 1}", came=came)
        rows = p["weight"][input_ids].to(self.act)
        return {"streams": rows.unsqueeze(2).repeat(1, 1, self.hc_mult, 1)}
