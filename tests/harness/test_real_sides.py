"""Planted faults in the real production side, and a patched reference: each is named at its own stage.

Both sides of the bundled checkpoint are built once. The case is short enough to be quick and long enough for a closed
window of every compressor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from harness import sides
from harness.cli import main
from harness.jsonl import read
from harness.records import Comparison, FirstFault, Record, Skip, Summary

LENGTH = "140"
HEADER = "import torch\n\n"


@pytest.fixture(scope="module", autouse=True)
def built_once() -> Iterator[None]:
    original = sides._build
    sides._build = cache(original)
    yield
    sides._build = original


Diff = Callable[..., tuple[int, list[Record]]]


@pytest.fixture
def diff(tmp_path: Path) -> Diff:
    """``diff(layer, option, ...)`` -> exit code and records."""

    def go(layer: str, *options: str) -> tuple[int, list[Record]]:
        path = tmp_path / "run.jsonl"
        code = main(["diff", "--layer", layer, "--length", LENGTH, "--json", str(path), *options])
        return code, read(path)

    return go


def fault(records: list[Record]) -> FirstFault:
    last = records[-1]
    assert isinstance(last, Summary)
    assert last.first_fault is not None
    return last.first_fault


def plant(folder: Path, stage: str, body: str) -> list[str]:
    path = folder / "planted.py"
    path.write_text(HEADER + body)
    return ["--replace", f"{stage}={path}:fn"]


COMB_TRANSPOSED = """def fn(stage, **inputs):
    out = stage.run(**inputs)
    return {**out, "comb": out["comb"].mT.contiguous()}
"""
COMB_UNTRANSPOSED_IN_MIX = """def fn(stage, **inputs):
    return stage.run(**{**inputs, "comb": inputs["comb"].mT.contiguous()})
"""
NO_WEIGHT_SCALE_2 = """def fn(stage, **inputs):
    name = next(n for n in stage.params if n.endswith("weight_scale_2"))
    return stage.run(params={name: torch.ones_like(stage.params[name])}, **inputs)
"""
#: the sink as a key of zeros that every query sees: its logit is 0, and not the learned one
ZERO_KEY_SINK = """def fn(stage, **inputs):
    return stage.run(params={"sinks": torch.zeros_like(stage.params["sinks"])}, **inputs)
"""
ONE_ELEMENT = """def fn(stage, **inputs):
    out = stage.run(**inputs)
    x = out["{output}"].clone()
    rms = x.float().square().mean().sqrt()
    at = (x.float().abs() >= rms).flatten().nonzero()[7]
    x.view(-1)[at] = (x.view(-1)[at].float() * 1.02).to(x.dtype)
    return {{**out, "{output}": x}}
"""
ZEROS = """def fn(stage, **inputs):
    return {n: torch.zeros_like(t) for n, t in stage.run(**inputs).items()}
"""


@pytest.mark.parametrize(
    ("stage", "body", "where"),
    [
        ("layers.2.attn_hc", COMB_TRANSPOSED, {"layers.2.attn_hc", "layers.2.attn_mix"}),
        ("layers.2.attn_mix", COMB_UNTRANSPOSED_IN_MIX, {"layers.2.attn_mix"}),
        ("layers.2.q_a", NO_WEIGHT_SCALE_2, {"layers.2.q_a"}),
        ("layers.2.experts", NO_WEIGHT_SCALE_2, {"layers.2.experts"}),
        ("layers.2.attn_core", ZERO_KEY_SINK, {"layers.2.attn_core"}),
        ("layers.2.q_b", ONE_ELEMENT.format(output="q"), {"layers.2.q_b"}),
        ("layers.2.kv", ONE_ELEMENT.format(output="kv"), {"layers.2.kv"}),
        ("layers.2.router", ONE_ELEMENT.format(output="logits"), {"layers.2.router"}),
    ],
)
def test_a_planted_fault_is_named_at_its_stage(
    diff: Diff, tmp_path: Path, stage: str, body: str, where: set[str]
) -> None:
    code, records = diff("2", *plant(tmp_path, stage, body))
    assert code == 1
    assert fault(records).stage in where
    assert fault(records).mode == "local"


@pytest.mark.parametrize("stage", ["attn_norm", "attn_core", "shared_expert", "moe_sum", "ffn_hc"])
def test_one_element_off_by_two_percent_in_fp32(diff: Diff, tmp_path: Path, stage: str) -> None:
    output = {"attn_norm": "x", "ffn_hc": "collapsed"}.get(stage, "out")
    options = plant(tmp_path, f"layers.2.{stage}", ONE_ELEMENT.format(output=output))
    code, records = diff("2", "--dtype", "fp32", *options)
    assert (code, fault(records).stage, fault(records).tensor) == (1, f"layers.2.{stage}", output)


def test_zeros_fail_every_stage(diff: Diff, tmp_path: Path) -> None:
    code, records = diff("all", "--mode", "local", *plant(tmp_path, "*", ZEROS))
    assert code == 1
    local = [r for r in records if isinstance(r, Comparison)]
    assert len(local) > 130
    assert [r.stage for r in local if r.verdict != "FAIL"] == []


def test_the_attention_half_by_the_reference(diff: Diff) -> None:
    code, records = diff("2", "--bypass", "layers.2.attn_*=reference")
    assert code == 0
    skipped = {r.stage for r in records if isinstance(r, Skip) and r.reason == "bypassed: reference"}
    assert {"layers.2.attn_hc", "layers.2.attn_core", "layers.2.attn_mix"} <= skipped
    assert all(r.bypass == "reference" for r in records if isinstance(r, Comparison) and r.stage in skipped)


def test_direct_residual(diff: Diff) -> None:
    code, records = diff("2", "--direct-residual")
    assert code == 0
    direct = [r.stage for r in records if isinstance(r, Comparison) and r.bypass == "direct"]
    assert direct == [f"layers.2.{s}" for s in ("attn_hc", "attn_mix", "ffn_hc", "ffn_mix")]


def test_two_faults_of_one_layer_are_bisected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "planted.py"
    path.write_text(
        "def fn(stage, **inputs):\n"
        "    return {n: t * 1.3 if n == 'out' else t for n, t in stage.run(**inputs).items()}\n"
    )
    options = [w for s in ("attn_core", "experts") for w in ("--replace", f"layers.5.{s}={path}:fn")]
    assert main(["bisect", "--layer", "5", "--length", LENGTH, *options]) == 1
    line = "BISECT: layers.5.attn_core + layers.5.experts (each breaks the logits alone)"
    assert capsys.readouterr().out.splitlines()[-1] == line


def test_a_patched_reference_is_not_certified(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

    forward = hf.DeepseekV4DecoderLayer.forward

    def patched(self: object, *args: object, **kwargs: object) -> object:
        out = forward(self, *args, **kwargs)
        return out * 1.01 if not isinstance(out, tuple) else (out[0] * 1.01, *out[1:])

    monkeypatch.setattr(hf.DeepseekV4DecoderLayer, "forward", patched)
    assert main(["diff", "--layer", "2", "--length", LENGTH]) == 3
    assert "INVALID: the reference is not the unmodified model" in capsys.readouterr().out.splitlines()[-1]
