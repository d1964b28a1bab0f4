"""How the tests judge a value: against float64, allowing the declared roundings and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from production.stage import Stage

V = 2.0**-24  # unit round-off of fp32


def assert_rounded(got: Tensor, exact: Tensor, slack: Tensor | float) -> None:
    """``got`` is the rounding, to its own dtype, of some number within ``slack`` of ``exact`` (float64)."""
    slack = torch.as_tensor(slack, dtype=torch.float64)
    low, high = (exact - slack).to(got.dtype), (exact + slack).to(got.dtype)
    bad = ~((got >= low) & (got <= high))
    assert not bad.any(), (
        f"{int(bad.sum())} of {bad.numel()} outside; first at {bad.nonzero()[0].tolist()}: "
        f"{got[bad][0]} for {exact[bad][0]}"
    )


def fp32_slack(magnitude: Tensor, terms: int, factor: float = 4.0) -> Tensor:
    """A generous bound of an fp32 sum of ``terms`` products whose absolute values add up to ``magnitude``."""
    return factor * V * (terms**0.5 + 4) * magnitude + 1e-40


def run(stage: Stage, **inputs: Tensor) -> dict[str, Tensor]:
    """Run a stage and hold it to its own promises: names, dims and dtypes."""
    outputs = stage.run(**inputs)
    assert list(outputs) == [o.name for o in stage.outputs]
    names = {"bf16": torch.bfloat16, "fp32": torch.float32, "int64": torch.int64, "bool": torch.bool}
    for promise in stage.outputs:
        value = outputs[promise.name]
        assert value.dtype == names[promise.dtype], promise
        assert value.dim() == len(promise.dims), promise
        for dim, size in zip(promise.dims, value.shape, strict=True):
            assert stage.sizes.get(dim, size) == size, promise
    return outputs
