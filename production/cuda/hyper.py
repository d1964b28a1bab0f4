"""Launches of csrc/hyper.cu on CUDA tensors, and the components that wrap them.

The launches check dtype, shape, layout, alignment and device before anything runs, write into tensors that the caller
may give (tests put guard bytes around theirs), and go to the current stream. The components take tensors of any device,
move them to the GPU and the results back: exact and slow, which is what a validation run needs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from production.component import Call, Params
from production.cuda import loader
from production.errors import ProductionError
from production.hyper_connection import HyperConnection, ResidualMix
from production.hyper_head import HyperHead

STREAMS = 4
ROWS = 2 * STREAMS + STREAMS**2
SMS = 132

_copies = WeakTensorKeyDictionary()  # parameter -> its copy on the GPU, as long as the parameter lives


def hc_pre(
    x: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    iterations: int,
    hc_eps: float,
    rms_eps: float,
    out: Sequence[Tensor] | None = None,
    work: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(pre fp32 [T, 4], post fp32 [T, 4], comb fp32 [T, 4, 4], collapsed bf16 [T, d]) of x bf16 [T, 4, d]."""
    t, d = _streams("hc_pre", x)
    _is("hc_pre: fn", fn, torch.float32, (ROWS, STREAMS * d))
    _is("hc_pre: base", base, torch.float32, (ROWS,))
    _is("hc_pre: scale", scale, torch.float32, (3,))
    shapes = ((t, STREAMS), (t, STREAMS), (t, STREAMS, STREAMS), (t, d))
    pre, post, comb, collapsed = _outputs("hc_pre", x, shapes, out)
    splits = split(t, STREAMS * d)
    work = _work("hc_pre", x, work, (splits, t, ROWS + 1))
    _launch(
        "dsv4_hc_pre",
        [x, fn, base, scale, work, pre, post, comb, collapsed],
        [t, d, splits, iterations],
        [hc_eps, rms_eps],
    )
    return pre, post, comb, collapsed


def hyper_head(
    x: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    hc_eps: float,
    rms_eps: float,
    out: Sequence[Tensor] | None = None,
    work: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(pre fp32 [T, 4], collapsed bf16 [T, d]) of x bf16 [T, 4, d]."""
    t, d = _streams("hyper_head", x)
    _is("hyper_head: fn", fn, torch.float32, (STREAMS, STREAMS * d))
    _is("hyper_head: base", base, torch.float32, (STREAMS,))
    _is("hyper_head: scale", scale, torch.float32, (1,))
    pre, collapsed = _outputs("hyper_head", x, ((t, STREAMS), (t, d)), out)
    splits = split(t, STREAMS * d)
    work = _work("hyper_head", x, work, (splits, t, STREAMS + 1))
    _launch("dsv4_hyper_head", [x, fn, base, scale, work, pre, collapsed], [t, d, splits], [hc_eps, rms_eps])
    return pre, collapsed


def hc_post(x: Tensor, post: Tensor, comb: Tensor, block: Tensor, out: Sequence[Tensor] | None = None) -> Tensor:
    """bf16 [T, 4, d]: post (x) block + comb transposed @ x, of x bf16 [T, 4, d] and block bf16 [T, d]."""
    t, d = _streams("hc_post", x)
    _is("hc_post: post", post, torch.float32, (t, STREAMS))
    _is("hc_post: comb", comb, torch.float32, (t, STREAMS, STREAMS))
    _is("hc_post: out", block, torch.bfloat16, (t, d))
    (result,) = _outputs("hc_post", x, ((t, STREAMS, d),), out)
    _launch("dsv4_hc_post", [x, post, comb, block, result], [t, d], [])
    return result


def split(tokens: int, channels: int) -> int:
    """Parts of K, so that small batches fill the GPU: 256 channels a warp at least, two CTAs an SM at most."""
    groups = -(-tokens // 4) if tokens <= 16 else -(-tokens // 16)
    return max(1, min(channels // 256, 2 * SMS // groups))


def _launch(name: str, tensors: list[Tensor], sizes: list[int], floats: list[float]) -> None:
    device = tensors[0].device
    if any(t.device != device for t in tensors):
        raise ProductionError(name, expected=f"all tensors on {device}", came=", ".join(str(t.device) for t in tensors))
    if device.type != "cuda":
        raise ProductionError(name, expected="CUDA tensors", came=str(device))
    if any(t.data_ptr() % 16 for t in tensors):
        raise ProductionError(name, expected="tensors aligned to 16 bytes", came="one that is not")
    lib = loader.library()
    with torch.cuda.device(device):
        code = getattr(lib, name)(
            *(ctypes.c_void_p(t.data_ptr()) for t in tensors),
            *map(ctypes.c_int, sizes),
            *map(ctypes.c_float, floats),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
    if code:
        raise RuntimeError(f"{name}: CUDA error {code}: {lib.dsv4_error(code).decode()}")


def _streams(name: str, x: Tensor) -> tuple[int, int]:
    """T and d of the streams."""
    good = x.dim() == 3 and x.shape[0] > 0 and x.shape[1] == STREAMS and x.shape[2] > 0 and x.shape[2] % 8 == 0
    if not good or x.dtype != torch.bfloat16 or not x.is_contiguous():
        expected = f"contiguous bf16 [T, {STREAMS}, d] with T > 0 and d a multiple of 8"
        raise ProductionError(f"{name}: streams", expected=expected, came=f"{x.dtype} {list(x.shape)} {x.stride()}")
    return x.shape[0], x.shape[2]


def _is(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        came = f"{tensor.dtype} {list(tensor.shape)} {tensor.stride()}"
        raise ProductionError(name, expected=f"contiguous {dtype} {list(shape)}", came=came)


def _outputs(name: str, x: Tensor, shapes: Sequence[tuple[int, ...]], out: Sequence[Tensor] | None) -> Sequence[Tensor]:
    """The caller's tensors, checked, or new ones; those whose last dim is d are bf16."""
    dtypes = [torch.bfloat16 if shape[-1] == x.shape[2] else torch.float32 for shape in shapes]
    if out is None:
        return [torch.empty(s, dtype=d, device=x.device) for s, d in zip(shapes, dtypes, strict=True)]
    for tensor, shape, dtype in zip(out, shapes, dtypes, strict=True):
        _is(f"{name}: output", tensor, dtype, shape)
    return out


def _work(name: str, x: Tensor, work: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    if work is None:
        return torch.empty(shape, dtype=torch.float32, device=x.device)
    _is(f"{name}: work", work, torch.float32, shape)
    return work


def _on_gpu(tensor: Tensor) -> Tensor:
    """A parameter's copy on the GPU, fp32."""
    copy: Tensor | None = _copies.get(tensor)  # type: ignore[no-untyped-call]
    if copy is None:
        copy = _copies[tensor] = tensor.detach().to("cuda", torch.float32, copy=True).contiguous()
    return copy


def _moved(tensor: Tensor, dims: int) -> Tensor:
    """An input on the GPU, with B and S in one."""
    return tensor.to("cuda").flatten(0, 1).reshape(-1, *tensor.shape[-dims:]).contiguous()


def _back(like: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Results as [B, S, ...] where the stage wants them; the copy waits for the kernels, so an error shows here."""
    torch.cuda.synchronize()
    return [t.reshape(*like.shape[:2], *t.shape[1:]).to(like.device) for t in tensors]


@dataclass(frozen=True, kw_only=True)
class CudaHyperConnection(HyperConnection):
    """csrc/hyper.cu: dsv4_hc_pre. Same ports, plan and parameters."""

    def compute(self, p: Params, call: Call, *, streams: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        results = hc_pre(
            _moved(streams, 2),
            _on_gpu(p["fn"]),
            _on_gpu(p["base"]),
            _on_gpu(p["scale"]),
            self.hc_sinkhorn_iters,
            self.hc_eps,
            self.rms_norm_eps,
        )
        return dict(zip(self.gives, _back(streams, *results), strict=True))


@dataclass(frozen=True, kw_only=True)
class CudaResidualMix(ResidualMix):
    """csrc/hyper.cu: dsv4_hc_post."""

    def compute(  # type: ignore[override]
        self, p: Params, call: Call, *, streams: Tensor, post: Tensor, comb: Tensor, out: Tensor
    ) -> dict[str, Tensor]:
        mixed = hc_post(_moved(streams, 2), _moved(post, 1), _moved(comb, 2), _moved(out, 1))
        return {"streams": _back(streams, mixed)[0]}


@dataclass(frozen=True, kw_only=True)
class CudaHyperHead(HyperHead):
    """csrc/hyper.cu: dsv4_hyper_head."""

    def compute(self, p: Params, call: Call, *, streams: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        results = hyper_head(
            _moved(streams, 2),
            _on_gpu(p["fn"]),
            _on_gpu(p["base"]),
            _on_gpu(p["scale"]),
            self.hc_eps,
            self.rms_norm_eps,
        )
        return dict(zip(self.gives, _back(streams, *results), strict=True))
