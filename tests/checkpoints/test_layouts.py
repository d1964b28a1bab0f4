"""Every layout: written, read by three independent decoders, by safetensors and by transformers' names, converted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from cases.checkpoints.convert import convert
from cases.checkpoints.folder import open_folder
from cases.checkpoints.headers import size_of
from cases.checkpoints.inspect import inspect
from cases.checkpoints.layout import LAYOUTS, detect, title
from cases.checkpoints.manifest import parts, specs
from cases.checkpoints.model import model, read_config
from cases.checkpoints.presets import FLASH, PRO
from cases.checkpoints.source import Source
from cases.checkpoints.synthesis import Synthesis
from cases.checkpoints.verify import verify
from production.build import model as production_side
from reference.checkpoint import open_checkpoint
from tests.checkpoints.conftest import CONFIG, OTHERS, Made

SIZES = model(CONFIG)
#: largest RMS error of a gaussian matrix over its RMS, by format (bf16: 2^-9 / sqrt 3 and a little)
LOSS = {"plain": 0.003, "fp8": 0.04, "mxfp4": 0.16, "nvfp4": 0.12, "nvfp4-ct": 0.12}


def source(folder: Path) -> Source:
    opened = open_folder(folder)
    layout = detect(opened.dtypes())
    assert layout is not None
    return Source(opened, model(read_config(folder)), layout)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def test_the_manifest_is_the_released_one() -> None:
    """Counts and bytes of DeepSeek-V4-Flash's index: 69,187 tensors, 159,609,485,896 bytes."""
    flash = list(specs(model(FLASH), LAYOUTS["deepseek"], draft=True))
    assert len({spec.name for spec in flash}) == len(flash) == 69187
    assert sum(size_of(spec.dtypes[0], spec.shape) for spec in flash) == 159_609_485_896
    assert sum(spec.role == "scale" for spec in flash) == 34167
    leaves = [spec.part.leaf for spec in flash]
    assert [leaves.count(leaf) for leaf in ("ape", "bias", "tid2eid", "attn_sink")] == [62, 41, 3, 44]
    assert model(PRO).ratios[:4] == (128, 128, 4, 128)
    assert sum(ratio == 128 for ratio in model(PRO).ratios) == 31


@pytest.mark.parametrize("layout", LAYOUTS)
def test_made_clean_and_recognised(made: Made, layout: str) -> None:
    folder = made(layout)
    report = verify(folder)
    assert report.findings == ()
    assert report.layout == layout
    assert report.checked == report.tensors == sum(1 for _ in specs(SIZES, LAYOUTS[layout]))
    found = inspect(folder)
    assert found.layout == layout
    assert [line.split(",")[0] for line in found.layers] == [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ]
    assert "unknown" not in {family.name for family in found.families}
    assert len(found.shards) > 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_safetensors_reads_the_same_bytes(made: Made, layout: str) -> None:
    folder = open_folder(made(layout))
    for shard in folder.headers:
        with safe_open(folder.path / shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                assert same(file.get_tensor(name), folder.tensor(name)), name


@pytest.mark.parametrize("layout", [*LAYOUTS, *OTHERS])
def test_three_decoders_agree(made: Made, layout: str) -> None:
    """The reference, production and this package share no code; exact formats leave them no room to differ."""
    folder = made(layout)
    assert verify(folder).findings == ()
    maker, checkpoint = source(folder), open_checkpoint(folder)
    for part in parts(SIZES):
        mine = maker.values(part)
        theirs = checkpoint.decode(checkpoint.manifest[part.key])
        assert torch.equal(mine.to(theirs.dtype), theirs), part.key
    side = production_side(folder)
    for stage in side.stages:
        decoded, expected = stage.decoded(), checkpoint.decoded(stage.name)
        assert set(decoded) == set(expected)
        for leaf, value in expected.items():
            assert torch.equal(decoded[leaf].to(value.dtype), value), f"{stage.name}.{leaf}"
    # Each byte once: tensors that nothing needs (input scales) apart, the reference reads what there is.
    for read in (checkpoint.shards.bytes_read / 2, int(side.provenance["bytes_read"])):
        assert read <= 1.001 * sum(folder_bytes(folder))


def folder_bytes(folder: Path) -> list[int]:
    opened = open_folder(folder)
    return [opened.stored(name).nbytes for name in opened.where]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_seed_is_one_model(made: Made, layout: str) -> None:
    """Each layout holds the same values as closely as its formats allow."""
    drawn, stored = Synthesis(SIZES, 11), source(made(layout))
    for part in parts(SIZES):
        ideal, found = drawn.values(part).double(), stored.values(part).double()
        gap = (ideal - found).square().mean().sqrt() / ideal.square().mean().sqrt()
        form = stored.form(part)
        assert gap <= (LOSS[form] if part.linear or part.plain == "BF16" else 1e-7), (part.key, form, float(gap))


def test_statistics_leave_no_fault_a_place_to_hide(made: Made) -> None:
    stored = source(made("modelopt-experts"))
    by_key = {part.key: part for part in parts(SIZES)}
    sinks = torch.cat([stored.values(p) for k, p in by_key.items() if k.endswith("attn_sink")])
    assert sinks.unique().numel() == sinks.numel()
    assert not bool((sinks == 0).any())
    assert all(bool((stored.values(p) != 1).any()) for k, p in by_key.items() if k.endswith("norm.weight"))
    table = stored.values(by_key["layers.0.ffn.gate.tid2eid"])
    assert set(table.flatten().tolist()) == set(range(SIZES.experts))
    scales = {k: float(stored.stored(p)["scale_2"]) for k, p in by_key.items() if ".experts." in k and p.layer == 1}
    for expert in range(SIZES.experts):
        at = f"layers.1.ffn.experts.{expert}."
        assert scales[f"{at}w1.weight"] == scales[f"{at}w3.weight"] != scales[f"{at}w2.weight"]
    assert len(set(scales.values())) == 2 * SIZES.experts
    closed = stored.values(by_key["layers.1.hc_attn_base"])[:4]
    assert float(closed.min()) < -10


def test_names_are_transformers_names(made: Made, tmp_path: Path) -> None:
    """``hf`` has the keys and shapes of a state dict, ``hf-saved`` those that save_pretrained writes."""
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

    raw = json.loads((made("hf") / "config.json").read_text())
    built = DeepseekV4ForCausalLM(DeepseekV4Config(**{k: v for k, v in raw.items() if k != "model_type"}))
    folder = open_folder(made("hf"))
    assert {n: tuple(t.shape) for n, t in built.state_dict().items()} == {
        n: folder.stored(n).shape for n in folder.where
    }
    built.save_pretrained(tmp_path)
    assert set(open_folder(tmp_path).where) == set(open_folder(made("hf-saved")).where)
    assert title(source(tmp_path).layout) == "hf-saved"


@pytest.mark.parametrize("target", ["hf", "hf-saved", "hf-experts", "modelopt-experts"])
def test_conversions_without_a_rounding(made: Made, tmp_path: Path, target: str) -> None:
    """DeepSeek's formats have power-of-two scales: bf16 and the lossless NVFP4 cast hold every value."""
    report = convert(made("deepseek"), tmp_path / "there", LAYOUTS[target])
    assert all(outcome.exact == outcome.tensors for outcome in report.outcomes.values()), report.lines()
    agree(made("deepseek"), tmp_path / "there")
    back = convert(tmp_path / "there", tmp_path / "back", LAYOUTS["deepseek"])
    assert all(outcome.exact == outcome.tensors for outcome in back.outcomes.values()), back.lines()
    agree(made("deepseek"), tmp_path / "back")
    assert verify(tmp_path / "back").findings == ()


def test_conversion_of_global_scales(made: Made, tmp_path: Path) -> None:
    """NVFP4's two flavours keep codes and block scales; the reciprocal of the global scale is rounded to float32."""
    report = convert(made("modelopt-all"), tmp_path / "ct", LAYOUTS["compressed-tensors"])
    routed = report.outcomes["routed experts: nvfp4 -> nvfp4-ct"]
    assert routed.error < 2.0**-23
    one, other = source(made("modelopt-all")), source(tmp_path / "ct")
    for part in parts(SIZES):
        if part.linear == "routed experts":
            a, b = one.stored(part), other.stored(part)
            assert torch.equal(a["weight"], b["weight"])
            assert same(a["scale"], b["scale"])
            assert abs(float(a["scale_2"]) * float(b["scale_2"]) - 1) < 2.0**-22
            assert abs(float(one.input_scale(part)) / float(other.input_scale(part)) - 1) < 2.0**-22
    assert verify(tmp_path / "ct").findings == ()


def test_a_lossy_conversion_says_so(made: Made, tmp_path: Path) -> None:
    report = convert(made("hf"), tmp_path / "out", LAYOUTS["modelopt-all"])
    text = "\n".join(report.lines())
    assert "attention: plain -> nvfp4: 0 of 15 tensors exact" in text
    assert "norms: copied: exact" in text
    assert "written as 1.0" in text
    assert {finding.kind for finding in verify(tmp_path / "out").findings} == {"input scale 1.0"}


def agree(one: Path, other: Path) -> None:
    a, b = source(one), source(other)
    for part in parts(SIZES):
        assert torch.equal(a.values(part).double(), b.values(part).double()), part.key
