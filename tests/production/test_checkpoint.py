"""The reader: manifest, headers, values, set-aside tensors, stacking and its memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from production.build import Model, model
from production.checkpoint import Reader, stack
from production.errors import ProductionError
from production.manifest import stage_leaves
from production.storage import Stored
from tests.production import synthetic
from tests.production.synthetic import CONFIG

Content = dict[str, Tensor]
W1 = "layers.1.ffn.experts.2.w1"


@pytest.fixture(scope="module")
def content() -> Content:
    return synthetic.tensors(CONFIG)


def test_every_parameter_is_the_checkpoints(content: Content, native: Model) -> None:
    for stage, leaves in stage_leaves(native.config).items():
        params = native.stage(stage).params
        for leaf in leaves:
            for suffix in ("weight", "weight_scale", "weight_scale_2", "input_scale") if leaf.projection else ("",):
                name = leaf.name.removesuffix("weight") + suffix if leaf.projection else leaf.name
                parts = [content[f"{stem}.{suffix}" if leaf.projection else stem] for stem in leaf.stems()]
                naive = torch.stack(parts) if leaf.experts else parts[0]
                assert params[name].dtype == naive.dtype
                assert torch.equal(params[name].reshape(-1).view(torch.uint8), naive.reshape(-1).view(torch.uint8)), (
                    stage,
                    name,
                )


def test_the_manifest_covers_the_checkpoint(content: Content, native: Model) -> None:
    stages = {stage.name for stage in native.stages}
    assert set(stage_leaves(native.config)) <= stages
    assert native.provenance["tensors"] == f"{len(content)} (0 of the draft module set aside)"


def test_stacking_reads_straight_into_one_buffer(folder: Path) -> None:
    """Beside the stack nothing of the weights is ever in memory."""
    reader, targets = Reader(folder), set()
    original = reader.read_into

    def noted(name: str, target: Tensor) -> None:
        targets.add(target.untyped_storage().data_ptr())
        original(name, target)

    reader.read_into = noted  # type: ignore[method-assign]
    native = "layers.1.ffn.experts.{expert}.w2.weight"
    buffer = stack(reader, Stored("down_proj.weight", native, ("U8",), (64, 16)), 6, torch.device("cpu"))
    assert targets == {buffer.untyped_storage().data_ptr()}
    assert torch.equal(buffer, torch.stack([reader.tensor(native.format(expert=e)) for e in range(6)]))


def test_parameters_own_their_memory(native: Model) -> None:
    """Nothing points into a mapped file, and no two parameters share storage."""
    tensors = [t for stage in native.stages for t in stage.params.values()]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)
    assert all(t.untyped_storage().nbytes() == t.numel() * t.itemsize for t in tensors)


def test_draft_module_is_set_aside(tmp_path: Path, content: Content) -> None:
    more = {**content, "mtp.0.norm.weight": torch.ones(3), "mtp.0.attn.wq_a.weight": torch.ones(2, dtype=torch.int8)}
    m = model(synthetic.write(tmp_path, more, CONFIG), layers=[0])
    assert m.provenance["tensors"].endswith("(2 of the draft module set aside)")


def test_one_file_without_an_index(tmp_path: Path, content: Content, native: Model) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(content, tmp_path / "model.safetensors")
    m = model(tmp_path)
    ids = torch.randint(50, (1, 20))
    assert torch.equal(m.forward(ids), native.forward(ids))


def _drop(name: str) -> Callable[[Content], Content]:
    return lambda c: {k: v for k, v in c.items() if k != name}


def _put(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Content], Content]:
    return lambda c: {**c, name: make(c[name])}


def _poke(value: int) -> Callable[[Tensor], Tensor]:
    """One byte of a tensor replaced."""

    def make(t: Tensor) -> Tensor:
        raw = t.clone().view(torch.uint8)
        raw.view(-1)[3] = value
        return raw.view(t.dtype)

    return make


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("layers.2.attn.attn_sink"), "came none named layers.2.attn.attn_sink; names of four"),
        (_drop("layers.2.ffn.gate.bias"), "came none named layers.2.ffn.gate.bias"),
        (_drop(f"{W1}.weight"), f"came none named {W1}.weight"),
        (_drop(f"{W1}.weight_scale_2"), f"came none named {W1}.weight_scale_2"),
        (lambda c: {**c, "layers.9.extra": torch.ones(1)}, "expected only tensors .* came layers.9.extra"),
        (lambda c: {f"net.{k}": v for k, v in c.items()}, "came none named embed.weight, .* and .* more"),
        (
            _put("layers.0.attn.wq_b.weight", lambda t: t.T),
            r"wq_b.weight: expected U8 \[128, 16\], came U8 \[16, 128\]",
        ),
        (_put("layers.1.hc_attn_fn", lambda t: t.half()), r"hc_attn_fn: expected BF16 or F32 \[24, 256\], came F16"),
        (_put("layers.1.attn.attn_sink", lambda t: t.half()), r"attn_sink: expected BF16 or F32 \[4\], came F16 \[4\]"),
        (
            _put("embed.weight", lambda t: t.int()),
            r"embed.weight: expected BF16 or F32 \[50, 64\], came I32 \[50, 64\]",
        ),
        (_put("layers.0.ffn.gate.tid2eid", lambda t: t.float()), "tid2eid: expected I64 or I32 .* came F32"),
        (
            _put("layers.0.ffn.gate.tid2eid", lambda t: t + 6),
            r"layers.0.router: tid2eid: expected ids 0..5, came 6..11",
        ),
        (_put(f"{W1}.weight_scale", lambda t: t.float()), f"{W1}.weight_scale: expected F8_E4M3 .* came F32"),
        (_put(f"{W1}.weight_scale_2", lambda t: t.view(1)), rf"{W1}.weight_scale_2: expected F32 \[\], came F32 \[1\]"),
        (_put(f"{W1}.weight_scale", _poke(0x7F)), f"{W1}.weight_scale: expected block scales, came an E4M3 NaN"),
        (
            _put("layers.0.attn.wo_a.weight_scale", _poke(0xFF)),
            "wo_a.weight_scale: expected block scales, came an E4M3",
        ),
        (_put(f"{W1}.weight_scale_2", lambda t: t * 0), f"{W1}.weight_scale_2: expected a finite number > 0, came 0.0"),
        (
            _put(f"{W1}.weight_scale_2", lambda t: t * torch.nan),
            "weight_scale_2: expected a finite number > 0, came nan",
        ),
        (_put("layers.3.attn.attn_sink", lambda t: t / 0), "attn_sink: expected finite values, came 4 that are not"),
        (_put("norm.weight", lambda t: t * torch.nan), "norm.weight: expected finite values, came 64 that are not"),
    ],
)
def test_refusals(tmp_path: Path, content: Content, change: Callable[[Content], Content], message: str) -> None:
    folder = synthetic.write(tmp_path, change(content), CONFIG)
    with pytest.raises(ProductionError, match=message) as caught:
        model(folder)
    assert "\n" not in str(caught.value)


def test_narrower_and_wider_tensors_load(tmp_path: Path, content: Content) -> None:
    """fp32 norms, bf16 sinks, int32 ids: other programs store them so. Values that survive give the same logits."""
    changed = {
        k: v.int() if k.endswith("tid2eid") else v.float() if k.endswith("norm.weight") else v
        for k, v in content.items()
    }
    ids = torch.randint(50, (1, 20))
    one, other = (model(synthetic.write(tmp_path / str(n), c, CONFIG)) for n, c in enumerate((content, changed)))
    assert torch.equal(one.forward(ids), other.forward(ids))
    sinks = {k: v.bfloat16() if k.endswith("attn_sink") else v for k, v in content.items()}
    narrow = model(synthetic.write(tmp_path / "narrow", sinks, CONFIG))
    assert narrow.stage("layers.1.attn_core").params["sinks"].dtype == torch.float32


def test_a_prefix_or_no_input_scale_changes_nothing(tmp_path: Path, content: Content) -> None:
    ids = torch.randint(50, (1, 20))
    plain = model(synthetic.write(tmp_path / "plain", content, CONFIG)).forward(ids)
    prefixed = {f"model.{k}": v for k, v in content.items() if not k.endswith("input_scale")}
    assert torch.equal(model(synthetic.write(tmp_path / "prefixed", prefixed, CONFIG)).forward(ids), plain)


def test_unused_input_scales_may_hold_anything(tmp_path: Path, content: Content) -> None:
    change = _put(f"{W1}.input_scale", lambda t: t * torch.nan)
    assert model(synthetic.write(tmp_path, change(content), CONFIG)).forward(torch.zeros(1, 3).long()).isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "form", "stem", "stage"),
    [
        (torch.float8_e5m2, "f8_e5m2", "layers.0.attn.wq_a", "layers.0.q_a"),
        (torch.float16, "f16", "layers.3.ffn.shared_experts", "layers.3.shared_expert"),
        (torch.int32, "i32", "layers.1.attn.indexer.wq_b", "layers.1.indexer"),
    ],
)
def test_a_format_without_a_component_names_the_stage(
    tmp_path: Path, content: Content, dtype: torch.dtype, form: str, stem: str, stage: str
) -> None:
    changed = dict(content)
    for name, tensor in content.items():
        if name.startswith(stem) and name.endswith(".weight"):
            stem_of = name.removesuffix(".weight")
            for suffix in ("weight_scale", "weight_scale_2", "input_scale"):
                del changed[f"{stem_of}.{suffix}"]
            n, half = tensor.shape
            changed[name] = torch.zeros(n, half * 2).to(dtype)
            if form == "f8_e5m2":
                changed[f"{stem_of}.scale"] = torch.ones(1)
    with pytest.raises(
        ProductionError, match=f"{stage}: expected a component for .*, came '{form}', which has no impl"
    ):
        model(synthetic.write(tmp_path, changed, CONFIG))


def test_mixed_formats_in_one_stage(tmp_path: Path, content: Content) -> None:
    changed = {k: v for k, v in content.items() if not k.startswith(f"{W1}.")}
    changed[f"{W1}.weight"] = torch.zeros(32, 64).bfloat16()
    with pytest.raises(ProductionError, match=rf"layers.1.experts: expected one format .*nvfp4 \(.*\), bf16 \({W1}\)"):
        model(synthetic.write(tmp_path, changed, CONFIG))


def test_scoring_without_a_component(tmp_path: Path, content: Content) -> None:
    folder = synthetic.write(tmp_path, content, {**CONFIG, "scoring_func": "softmax"})
    with pytest.raises(ProductionError, match=r"layers.0.router: .* came 'hash softmax', which has no implementation"):
        model(folder)


def test_broken_folders(tmp_path: Path, content: Content) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ProductionError, match=r"expected model.safetensors.index.json or model.safetensors, came nei"):
        model(tmp_path)
    folder = synthetic.write(tmp_path, content, CONFIG)
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text.replace("model-00001-of-00002", "../model-00001-of-00002"))
    with pytest.raises(ProductionError, match="expected shards beside the index, came no file"):
        model(folder)
    wrong = json.loads(text)["weight_map"]
    wrong["embed.weight"] = next(f for f in set(wrong.values()) if f != wrong["embed.weight"])
    index.write_text(json.dumps({"weight_map": wrong}))
    with pytest.raises(
        ProductionError, match=r"in the shard that the index names, came another place for embed.weight"
    ):
        model(folder)
    index.write_text("[]")
    with pytest.raises(ProductionError, match="expected an index with a weight_map"):
        model(folder)
    index.write_text(text)
    next(folder.glob("*.safetensors")).write_bytes(b"not a safetensors file")
    with pytest.raises(ProductionError, match="expected a safetensors file"):
        model(folder)


def test_no_fold_of_a_ragged_k(tmp_path: Path) -> None:
    config = {**CONFIG, "q_lora_rank": 24}
    with pytest.raises(ProductionError, match=r"layers.0.q_b: expected K a multiple of 16 for NVFP4, came K = 24"):
        model(synthetic.write(tmp_path, synthetic.tensors(CONFIG), config))
