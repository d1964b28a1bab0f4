"""Faults that one process on a CPU cannot show, and what each waits for."""

from __future__ import annotations

from cases.faults.catalogue import waits

RANKS, GRAPH, GPU = "several ranks", "a captured graph", "a GPU kernel"

waits(
    "scales-not-sharded-with-weights",
    "layers.2.q_a",
    "a rank's shard of the weight meets another rank's scales",
    RANKS,
    "https://github.com/vllm-project/vllm/pull/49951",
)
waits(
    "nvfp4-input-scale-scope",
    "layers.2.experts",
    "input_scale is the maximum over the local experts",
    f"{RANKS} and activations in fp4",
    "https://github.com/vllm-project/vllm/pull/26135",
)
waits(
    "nvfp4-input-scale-missing-or-zero",
    "layers.2.experts",
    "an expert without calibration divides by zero",
    "activations in fp4",
    "https://github.com/vllm-project/vllm/issues/45212",
)
waits(
    "nvfp4-w13-max-without-rescale",
    "layers.2.experts",
    "gate and up share the larger weight_scale_2 without a rescale of their blocks",
    "a checkpoint whose gate and up differ in weight_scale_2",
    "https://github.com/NVIDIA/TensorRT-LLM/pull/14199",
)
waits(
    "clamp-after-quantisation",
    "layers.2.experts",
    "the activation's scale is set by a value that the clamp removes",
    "activations in fp4 or fp8",
    "https://github.com/vllm-project/vllm-ascend/pull/9590",
)
waits(
    "fp8-quantiser-rounding",
    "layers.2.kv",
    "a multiplier one ulp too high sends ties up",
    "a quantiser in production",
    "https://github.com/sgl-project/sglang/pull/33533",
)
waits(
    "mx-scale-rounding-rule",
    "layers.2.kv",
    "floor instead of ceil of the block's exponent",
    "a quantiser in production",
    "https://github.com/ROCm/aiter/pull/3212",
)
waits(
    "kv-fp8-semantics-differ",
    "layers.2.kv_cache",
    "keys are stored in fp8, rope channels too",
    "a cache in fp8",
    "https://github.com/NVIDIA/TensorRT-LLM/issues/14327",
)
waits(
    "batched-verify-does-not-save-first-block",
    "layers.2.compressor",
    "a partly accepted draft goes on from the overlap of all its tokens",
    "a scenario of drafts and rejections in the catalogue",
    "https://github.com/vllm-project/vllm-ascend/issues/9111",
)
waits(
    "additive-mask-overflow",
    "layers.2.attn_core",
    "two planes of the smallest finite value add up to minus infinity",
    "a case of rows with unequal lengths",
    "https://github.com/NVIDIA-NeMo/Automodel/pull/2658",
)
waits(
    "fully-masked-row-nan",
    "layers.2.attn_core",
    "a row that sees no key gives NaN",
    "a case of rows with unequal lengths",
    "https://github.com/ikawrakow/ik_llama.cpp/issues/2344",
)
waits(
    "pad-tokens-pooled",
    "layers.2.compressor",
    "padding takes slots of the windows",
    "a case of rows with unequal lengths",
    "https://github.com/huggingface/transformers/issues/45938",
)
waits(
    "fused-projection-dropped-or-mis-split",
    "layers.2.q_a",
    "the packed shards of a fused projection are not copied",
    "a fused projection in production",
    "https://github.com/sgl-project/sglang/issues/33245",
)
waits(
    "collapsed-stage-passed-to-mtp",
    "mtp",
    "the next-token block gets the collapsed state",
    "the next-token-prediction block",
    "https://github.com/AI-Hypercomputer/maxtext/pull/4736",
)
waits(
    "live-token-diagonal-from-mask-width",
    "layers.2.compressor",
    "the live token is located by the width of a static mask",
    GRAPH,
    "https://github.com/huggingface/transformers/pull/48721",
)
waits(
    "compressor-depends-on-batch-shape",
    "layers.2.compressor",
    "the tile size follows the batch",
    GPU,
    "https://github.com/vllm-project/vllm-ascend/issues/9496",
)
