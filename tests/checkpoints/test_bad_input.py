"""Broken files, links, replaced shards, bad configs and targets: one clear line each, from all three readers."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cases.checkpoints import write
from cases.checkpoints.folder import open_folder
from cases.checkpoints.headers import HeaderError, read_header
from cases.checkpoints.layout import LAYOUTS
from cases.checkpoints.make import make
from cases.checkpoints.verify import verify
from harness.cli import main
from harness.types import UsageError
from production.checkpoint import Reader
from production.errors import ProductionError
from production.shards import Shard
from reference.checkpoint import open_checkpoint
from reference.shards import Shards
from tests.checkpoints.conftest import CONFIG, Made, cut_short, shard_of

INDEX = "model.safetensors.index.json"
NAME = "layers.1.attn.wkv.weight"


def header(entries: dict[str, Any]) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def entry(start: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


#: what a file holds -> what this package's reader says of it (a refusal, or a listed problem)
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "at least 8 bytes, came 0"),
    "no header": (b"\x00" * 4, "at least 8 bytes, came 4"),
    "enormous header": ((1 << 62).to_bytes(8, "little") + b"{}", "at most 100000000 bytes"),
    "header beyond the file": ((1000).to_bytes(8, "little") + b"{}", "a header of 1000 bytes, came a file of 10"),
    "no JSON": (header({})[:8] + b"{]", "expected JSON"),
    "no object": ((2).to_bytes(8, "little") + b"[]", "expected a JSON object"),
    "a name twice": ((20).to_bytes(8, "little") + b'{"a":null,"a":null} ', "every key once"),
    "deep JSON": ((200_001).to_bytes(8, "little") + b'{"a":' + b"[" * 199_996, "expected JSON"),
    "no entry": (header({"a": 3}), "a: expected an object, came int"),
    "unknown dtype": (header({"a": entry(0, 1, "U9")}) + b"x", "a: expected a dtype of the format, came 'U9'"),
    "negative shape": (header({"a": entry(0, 1, shape=[-1])}) + b"x", "a: expected a shape"),
    "no whole shape": (header({"a": entry(0, 1, shape=[True])}) + b"x", "a: expected a shape"),
    "offsets of another size": (header({"a": entry(0, 3, "F32", [1])}) + b"xxx", "a: expected 4 bytes"),
    "offsets reversed": (header({"a": entry(2, 0, shape=[0])}), "a: expected data_offsets"),
    "huge offsets": (header({"a": entry(1 << 63, 1 << 63)}), "a: expected data_offsets"),
    "overlap": (header({"a": entry(0, 4), "b": entry(2, 6)}) + b"x" * 6, "b: .* overlaps"),
    "gap": (header({"a": entry(0, 4), "b": entry(6, 8)}) + b"x" * 8, "b: .* leaves a gap"),
    "data cut": (header({"a": entry(0, 4), "b": entry(4, 8)}) + b"x" * 5, "b: .* cut short by 3 bytes"),
    "data left over": (header({"a": entry(0, 4)}) + b"x" * 5, "1 bytes belong to no tensor"),
    "a width of 2^80": (header({"a": entry(0, 4, shape=[1 << 40, 1 << 40])}) + b"x" * 4, "a: expected [0-9]+ bytes"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_headers(tmp_path: Path, case: str) -> None:
    content, message = BROKEN[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert re.search(message, said(path)), said(path)
    with pytest.raises(UsageError, match=path.name) as reference:
        Shards(tmp_path)
    with pytest.raises(ProductionError, match=path.name) as production:
        Shard(path)
    assert "\n" not in str(reference.value) + str(production.value)


def said(path: Path) -> str:
    try:
        return "problem: " + "; ".join(read_header(path).problems)
    except HeaderError as error:
        return str(error)


OFFSETS = st.one_of(st.integers(-4, 40), st.integers(0, 1 << 70), st.none(), st.text(max_size=2))
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.one_of(
            st.sampled_from(["U8", "F32", "F4", "BF16", "F8_E8M0", "X"]), st.sampled_from([None, 7, []])
        ),
        "shape": st.one_of(st.lists(OFFSETS, max_size=3), st.none(), st.just({})),
        "data_offsets": st.one_of(st.lists(OFFSETS, max_size=3), st.none()),
    },
)
HEADERS = st.one_of(
    st.binary(max_size=64),
    st.dictionaries(
        st.text(max_size=3), st.one_of(ENTRY, st.none(), st.lists(st.integers(), max_size=2)), max_size=3
    ).map(lambda entries: json.dumps(entries).encode()),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(HEADERS, st.one_of(st.none(), st.integers(0, 1 << 64 - 1)), st.binary(max_size=40))
def test_any_header_is_read_or_refused(tmp_path: Path, text: bytes, length: int | None, data: bytes) -> None:
    """Whatever a file holds, each reader answers with tensors inside the file or with its own one-line error."""
    path = tmp_path / "model.safetensors"
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    answers(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 60))
def test_damaged_headers(tmp_path: Path, changes: list[tuple[int, int]], cut: int) -> None:
    """Bytes of a good file changed, and its end cut."""
    entries = {"a.weight": entry(0, 8, "F32", [2]), "b.weight": entry(8, 24, "U8", [4, 4]), "__metadata__": {"k": "v"}}
    content = bytearray(header(entries) + bytes(24))
    for at, value in changes:
        content[at % len(content)] = value
    path = tmp_path / "model.safetensors"
    path.write_bytes(content[: len(content) - cut])
    answers(path)


def answers(path: Path) -> None:
    size = path.stat().st_size
    outcomes: list[bool] = []
    lines: list[str] = []
    for reader in (_mine, _reference, _production):
        try:
            places = reader(path)
        except (HeaderError, UsageError, ProductionError) as error:
            lines.append(str(error))
            outcomes.append(False)
            continue
        assert all(0 <= start <= end <= size for start, end in places)
        outcomes.append(True)
    assert all("\n" not in line and len(line) < 1500 for line in lines)
    assert outcomes[1] <= outcomes[0]  # nothing that a side loads is a broken file here
    assert outcomes[2] <= outcomes[0]


def _mine(path: Path) -> list[tuple[int, int]]:
    found = read_header(path)
    if found.problems:
        raise HeaderError("; ".join(found.problems)[:1000])
    return [(t.start, t.end) for t in found.tensors.values()]


def _reference(path: Path) -> list[tuple[int, int]]:
    return [(h.at, h.at + h.size) for h in Shards(path.parent).headers.values()]


def _production(path: Path) -> list[tuple[int, int]]:
    return [(s.start, s.end) for s in Shard(path).slots.values()]


def refused(folder: Path, message: str) -> None:
    """Both sides refuse the folder; the reference's line matches."""
    with pytest.raises(UsageError, match=message) as reference:
        open_checkpoint(folder)
    with pytest.raises(ProductionError) as production:
        Reader(folder)
    assert "\n" not in str(reference.value) + str(production.value)


def test_files_that_are_none(copy: Made) -> None:
    folder = copy("deepseek")
    shard = shard_of(folder, NAME)
    kept = shard.rename(folder / "kept")
    refused(folder, "came no such file")
    shard.mkdir()
    refused(folder, "came a folder, pipe or device")
    shard.rmdir()
    os.mkfifo(shard)  # a reader that opens it first would wait for ever
    refused(folder, "came a folder, pipe or device")
    assert [f.kind for f in verify(folder, values=False).findings] == ["unreadable shard"]
    shard.unlink()
    shard.symlink_to(folder / "nowhere")
    refused(folder, "came no such file")
    shard.unlink()
    shard.symlink_to(shard)
    assert [f.kind for f in verify(folder, values=False).findings] == ["unreadable shard"]
    with pytest.raises(UsageError, match=shard.name):
        open_checkpoint(folder)
    shard.unlink()
    shard.symlink_to(kept)  # as in the hub's cache: a link to a whole file is a shard
    open_checkpoint(folder)
    Reader(folder).close()
    assert verify(folder).findings == ()


def test_a_cut_shard(copy: Made) -> None:
    folder = copy("deepseek")
    cut_short(shard_of(folder, NAME), 1)
    refused(folder, "truncated or corrupt")


def test_an_index_that_leads_outside(copy: Made) -> None:
    folder = copy("deepseek")
    index = folder / INDEX
    raw = json.loads(index.read_text())
    for bad in ("../x.safetensors", "/etc/passwd", "a/../x.safetensors", "x.bin", 7, None):
        raw["weight_map"][NAME] = bad
        index.write_text(json.dumps(raw))
        refused(folder, "expected the name of a .safetensors file beside it")
        assert any("not followed" in f.text for f in verify(folder, values=False).findings)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}', "[" * 100_000, "\x00"])
def test_no_index(copy: Made, text: str) -> None:
    folder = copy("deepseek")
    (folder / INDEX).write_text(text)
    refused(folder, INDEX)
    with pytest.raises(UsageError, match=INDEX):
        verify(folder)


@pytest.mark.parametrize("how", ["replaced", "rewritten", "cut", "removed"])
def test_a_shard_that_changes_while_it_is_read(copy: Made, how: str) -> None:
    """Headers were read; then somebody copies over the checkpoint."""
    folder = copy("deepseek")
    shard = shard_of(folder, NAME)
    checkpoint, reader, opened = open_checkpoint(folder), Reader(folder), open_folder(folder)
    content = shard.read_bytes()
    if how == "replaced":
        (folder / "new").write_bytes(content)
        os.replace(folder / "new", shard)
    elif how == "rewritten":
        shard.write_bytes(content)
        os.utime(shard, ns=(1, 1))
    elif how == "cut":
        os.truncate(shard, len(content) // 2)
    else:
        shard.unlink()
    with pytest.raises(UsageError, match=NAME):
        checkpoint.decode(checkpoint.manifest[NAME])
    with pytest.raises((ProductionError, OSError), match=shard.name):
        reader.tensor(NAME)
    with pytest.raises(UsageError, match="replaced or cut while being read"):
        opened.tensor(NAME)


def spoiled(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**config, **changes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: spoiled(c, model_type="deepseek_v41"), "deepseek_v41"),
        (lambda c: spoiled(c, model_type="llama"), "'llama'"),
        (lambda c: spoiled(c, compress_ratios=[0, 4]), "compress_ratios"),
        (lambda c: spoiled(c, compress_ratios=[0, 4, 64]), "compress_ratios"),
        (lambda c: spoiled(c, rope_scaling={**c["rope_scaling"], "type": "longrope"}), "longrope|rope"),
        (lambda c: spoiled(c, hidden_size="big"), "hidden_size"),
        (lambda c: spoiled(c, num_experts_per_tok=9), "num_experts_per_tok"),
        (lambda c: [c], "JSON object"),
    ],
)
def test_configs(copy: Made, capsys: pytest.CaptureFixture[str], change: Callable[[Any], Any], message: str) -> None:
    folder = copy("deepseek")
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    for command in ("verify", "inspect"):
        assert main(["checkpoint", command, str(folder)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "config.json" in error
        assert re.search(message, error), error


def test_hugging_face_schedules_of_the_wrong_length(copy: Made, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy("hf")
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "layer_types": raw["layer_types"][:2]}))
    assert main(["checkpoint", "verify", str(folder)]) == 2
    assert "layer_types: expected a list of 3 entries, came 2 entries" in capsys.readouterr().err


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """The disk fills up after some tensors: no folder that looks whole, no leftovers."""
    original, calls = write.Writer.put, 0

    def put(self: write.Writer, name: str, piece: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise OSError(error, os.strerror(error))
        original(self, name, piece)

    monkeypatch.setattr(write.Writer, "put", put)
    with pytest.raises(UsageError, match="nothing was left behind") as caught:
        make(tmp_path / "out", CONFIG, LAYOUTS["deepseek"])
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(self: write.Writer, name: str, piece: torch.Tensor) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(write.Writer, "put", put)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "out", CONFIG, LAYOUTS["hf"])
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "make", str(tmp_path / "pro"), "--config", "pro", "--layout", "hf"]) == 2
    error = capsys.readouterr().err
    assert "GB of free space" in error
    assert "fewer layers or experts" in error
    assert list(tmp_path.iterdir()) == []


def test_targets(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("kept")
    words = ["--layers", "0", "--experts", "2", "--layout", "hf"]
    for target, message in (
        (tmp_path / "full", "came one that holds something"),
        (tmp_path / "full" / "file", "came one that holds something"),
        (tmp_path / "none" / "out", "create it"),
        (Path("/proc/out"), "/proc/out"),
    ):
        assert main(["checkpoint", "make", str(target), *words]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    (tmp_path / "empty").mkdir()
    assert main(["checkpoint", "make", str(tmp_path / "empty"), *words]) == 0
    assert main(["checkpoint", "convert", str(tmp_path / "nothing"), str(tmp_path / "x"), "--layout", "hf"]) == 2
    assert "expected a checkpoint folder, came nothing" in capsys.readouterr().err


def test_a_broken_source_is_not_converted(copy: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy("deepseek")
    cut_short(shard_of(folder, NAME), 1)
    assert main(["checkpoint", "convert", str(folder), str(tmp_path / "out"), "--layout", "hf"]) == 2
    assert "verify it first" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "3-1"], "expected layers among 0-5"),
        (["--layers", "0-9"], "expected layers among 0-5, came '0-9'"),
        (["--layers", "one"], "expected numbers such as 0-3"),
        (["--experts", "1"], "expected 2 to 8"),
        (["--experts", "9"], "expected 2 to 8"),
        (["--experts", "-1"], "--experts"),
        (["--seed", "x"], "--seed: expected a whole number"),
        (["--shard-mb", "0"], "--shard-mb: expected a whole number of at least 1"),
        (["--layout", "gguf"], "invalid choice"),
        (["--config", "v5"], "invalid choice"),
    ],
)
def test_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["checkpoint", "make", str(tmp_path / "out"), "--layout", "hf", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_draft_blocks_need_a_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "make", str(tmp_path / "out"), "--layout", "hf", "--mtp"]) == 2
    assert "has no place for it" in capsys.readouterr().err
