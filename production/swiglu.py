"""The clamped SwiGLU that routed and shared experts have in common.

``act = silu(min(gate, limit)) * clamp(up, -limit, limit)`` in fp32, to be rounded once by the caller
(HF: DeepseekV4MLP.forward, DeepseekV4Experts._apply_gate). The gate has no lower clamp.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """fp32 in, fp32 out, same shape."""
    return F.silu(gate.clamp(max=limit)).mul_(up.clamp(min=-limit, max=limit))
