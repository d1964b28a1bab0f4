"""Prompts and answers: chat templates with thinking on, end-of-sequence ids, pieces of text; both columns."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.generate import MAX_NEW_TOKENS
from harness.generate.columns import Columns, Plain
from harness.generate.run import Wish
from harness.generate.text import Text
from harness.types import UsageError

TINY = Path(__file__).parents[2] / "cases" / "tiny"


def checkpoint(folder: Path, **config: Any) -> Path:
    """The bundled tokenizer with another tokenizer_config.json."""
    shutil.copy(TINY / "tokenizer.json", folder)
    shutil.copy(TINY / "config.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", **config}))
    return folder


def test_without_a_template_the_prompt_is_plain_text() -> None:
    text = Text(TINY)
    assert text.decode(text.encode("the lamp is in the kitchen")) == "<bos> the lamp is in the kitchen"
    assert text.stop == {1}


@pytest.mark.parametrize("switch", ["thinking", "enable_thinking", "thinking_mode == 'thinking'", "reasoning"])
def test_thinking_is_on_whatever_its_switch_is_called(tmp_path: Path, switch: str) -> None:
    template = (
        "{{ bos_token }} {% for m in messages %}{{ m.role }}: {{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %} <answer>{% if "
        + switch
        + " %} <think>{% else %} </think>{% endif %}{% endif %}"
    )
    text = Text(checkpoint(tmp_path, chat_template=template))
    assert text.template is not None
    assert text.render(text.template, "the lamp") == "<bos> user: the lamp <answer> <think>"


def test_a_template_in_a_file_of_its_own_and_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }} the lamp"}]
    text = Text(checkpoint(tmp_path, chat_template=named))
    assert text.encode("key") == [0, 3, 12]
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }} key")
    assert text.encode("the") == [3, 13]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no system role') }}", "the chat template refuses the prompt: no system role"),
        ("{% for %}", "the chat template cannot be rendered"),
        ("{{ messages.__class__.__mro__ }}", "the chat template cannot be rendered: SecurityError"),
    ],
)
def test_templates_that_refuse_or_break(tmp_path: Path, template: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Text(checkpoint(tmp_path, chat_template=template)).encode("the")


def test_there_is_no_switch_that_turns_thinking_off(capsys: pytest.CaptureFixture[str]) -> None:
    from harness.cli import main

    assert MAX_NEW_TOKENS == Wish().max_new_tokens == 4096
    assert main(["generate", "--help"]) == 0
    assert "think" not in capsys.readouterr().out


def test_stop_ids(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert Text(folder).stop == {5, 7}
    (folder / "generation_config.json").unlink()
    assert Text(folder).stop == {1}
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(UsageError, match="is not a JSON file"):
        Text(folder)


def test_pieces_join_to_the_text() -> None:
    text, ids = Text(TINY), [0, 3, 12, 4, 5, 3, 38, 1]
    pieces = [text.piece(ids[:i], ids[i]) for i in range(1, len(ids))]
    assert text.decode(ids[:1]) + "".join(pieces) == text.decode(ids)


def said(mine: str | None, theirs: str | None) -> Any:
    return SimpleNamespace(texts=(mine, theirs))


def test_columns_stay_in_step_and_mark_what_differs() -> None:
    out = io.StringIO()
    show = Columns(out)
    show.width = 24
    for mine, theirs in [
        (" lamp", " lamp"),
        (" is", " is"),
        (" in\n", " on"),
        (" the", " the"),
        (" attic\x1b", " attic"),
    ]:
        show(said(mine, theirs))
    show(said(" kitchen", " kitchen"))
    show.pause()
    lines = out.getvalue().splitlines()
    assert lines[0].split("│")[0].strip() == "reference"
    assert lines[1] == f"{' lamp is on the attic':<24} ≠  lamp is in⏎ the attic·"
    assert lines[2] == f"{'kitchen':<24} │ kitchen"


def test_one_side_is_its_text_alone() -> None:
    out = io.StringIO()
    show = Plain(out)
    for piece in (" kitchen", " <eos>"):
        show(said(piece, None))
    show.pause()
    assert out.getvalue() == " kitchen <eos>\n"
