"""Write the bundled checkpoint: ModelOpt NVFP4 bytes under DeepSeek's tensor names, config and tokenizer.

python -m cases.training.export --random            # untrained weights, for loader work
python -m cases.training.export --state a.pt b.pt   # what train.py saved
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from .arch import CONFIG, LAYERS, build, is_f32, is_nvfp4, to_checkpoint
from .calibrate import input_amax
from .nvfp4 import quantize, tensor_scale
from .start import initialise
from .task import SPECIAL, WORD_ID, encode, pairs, story

OUT = Path(__file__).resolve().parents[1] / "tiny"
PRODUCER = {"name": "dsv4-harness", "version": "1"}  # ModelOpt's layout, but not ModelOpt's program
IGNORE = ["embed", "head", "*.ffn.gate", "*.attn.compressor.*", "*.attn.indexer.weights_proj"]
IGNORE += ["*.attn.indexer.compressor.*", "mtp.*"]


def quantization_config() -> dict[str, Any]:
    """`quantization_config` of config.json."""
    fp4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "config_groups": {"group_0": {"input_activations": fp4, "weights": fp4, "targets": ["Linear"]}},
        "ignore": IGNORE,
        "producer": PRODUCER,
    }


def tensors(state: dict[str, Tensor], amax: dict[str, float]) -> dict[str, Tensor]:
    """Hugging Face fp32 state dict and activation maxima -> every tensor of the checkpoint, as stored."""
    plain = to_checkpoint({k: v.detach().cpu() for k, v in state.items()})
    out: dict[str, Tensor] = {}
    for name, t in plain.items():
        if name.endswith("tid2eid"):
            out[name] = t.long()
        elif is_f32(name):
            out[name] = t.float()
        elif not is_nvfp4(name):
            out[name] = t.bfloat16()
        else:
            stem = name.removesuffix(".weight")
            partner = {"w1": "w3", "w3": "w1"}.get(stem.rsplit(".", 1)[-1])
            top = t.abs().max()
            if partner:  # the real export fuses gate and up, so both carry one weight_scale_2
                top = torch.maximum(top, plain[f"{stem[:-2]}{partner}.weight"].abs().max())
            q = quantize(t.float(), top)
            out[f"{stem}.weight"], out[f"{stem}.weight_scale"] = q.weight, q.weight_scale
            out[f"{stem}.weight_scale_2"] = q.weight_scale_2
            out[f"{stem}.input_scale"] = tensor_scale(torch.tensor(amax[stem]))
    return {k: v.contiguous().clone() for k, v in out.items()}


def export(model: DeepseekV4ForCausalLM, out: Path = OUT, seed: int = 1) -> None:
    """Calibrate, quantise and write `model` (fp32, on the CPU) to `out`."""
    prompts = [torch.tensor([encode(story(seed + i, 511)) for i in range(2)])]
    prompts += [torch.tensor([encode(pairs(seed, 255)), encode(story(seed + 9, 255))])]
    stored = tensors(model.state_dict(), input_amax(model, prompts))
    out.mkdir(parents=True, exist_ok=True)
    _write_shards(stored, out)
    _write_json(out / "config.json", {**CONFIG, "quantization_config": quantization_config()})
    quantization = {k: v for k, v in quantization_config().items() if k in ("quant_algo", "kv_cache_quant_algo")}
    quantization |= {"group_size": 16, "exclude_modules": IGNORE}
    _write_json(out / "hf_quant_config.json", {"producer": PRODUCER, "quantization": quantization})
    _write_json(out / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2})
    _write_tokenizer(out)


def _write_shards(stored: dict[str, Tensor], out: Path) -> None:
    """Two shards, the second from layer LAYERS / 2 on, and the index."""
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    shard: list[dict[str, Tensor]] = [{}, {}]
    for name, t in sorted(stored.items()):
        late = name.startswith("layers.") and int(name.split(".")[1]) >= LAYERS // 2
        shard[late or name.startswith(("head", "norm", "hc_head"))][name] = t
    for name, part in zip(names, shard, strict=True):
        save_file(part, out / name, metadata={"format": "pt"})
        (out / name).chmod(0o644)
    size = sum(t.numel() * t.element_size() for t in stored.values())
    where = {k: name for name, part in zip(names, shard, strict=True) for k in part}
    _write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": where})


def _write_tokenizer(out: Path) -> None:
    """Words split on white space; `<bos>` in front; a word outside the vocabulary is an error, not `<unk>`."""
    tokenizer = Tokenizer(WordLevel(WORD_ID, unk_token="<unk>"))  # absent from the vocabulary: unknown words raise
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", WORD_ID["<bos>"])])
    tokenizer.save(str(out / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **special}
    _write_json(out / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--random", action="store_true", help="untrained weights")
    source.add_argument("--state", nargs="+", type=Path, help="state dict parts written by train.py")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    model = build()
    initialise(model)
    if args.state:
        state: dict[str, Tensor] = {}
        for part in args.state:
            state |= torch.load(part, weights_only=True)
        model.load_state_dict(state)
    export(model, args.out)


if __name__ == "__main__":
    main()
