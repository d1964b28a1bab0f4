"""Text in and out of a checkpoint: its tokenizer, its chat template, its end-of-sequence ids.

A checkpoint with a chat template is a chat model: the prompt becomes one user message, rendered by that template. A
template with a thinking mode is rendered with thinking on, whatever its switch is called; a model trained to think
answers another distribution without it, so there is no option that turns it off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import case as cases
from harness.types import UsageError, one_line

#: names that templates give the switch of their thinking mode, with the value that means "on"
THINKING: Mapping[str, object] = {
    "thinking": True,
    "enable_thinking": True,
    "thinking_mode": "thinking",
    "reasoning": True,
    "enable_reasoning": True,
}


class Text:
    """Encoding and decoding by one checkpoint's files. Without a tokenizer, ids are written as numbers."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.tokenizer = cases.open_tokenizer(checkpoint)
        self.settings = _json(checkpoint / "tokenizer_config.json")
        self.stop = _stop(checkpoint)

    @property
    def template(self) -> str | None:
        """The chat template, from ``chat_template.jinja`` or ``tokenizer_config.json``."""
        path = self.checkpoint / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        found = self.settings.get("chat_template")
        if isinstance(found, list):  # several named ones: the one for plain chats
            named = {t["name"]: t["template"] for t in found if isinstance(t, dict) and {"name", "template"} <= set(t)}
            found = named.get("default", next(iter(named.values()), None))
        return found if isinstance(found, str) else None

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt, as a user message where there is a chat template."""
        template = self.template
        if template is None or self.tokenizer is None:
            return cases.tokenise(self.checkpoint, prompt)
        ids: list[int] = self.tokenizer.encode(self.render(template, prompt), add_special_tokens=False).ids
        return ids

    def render(self, template: str, prompt: str) -> str:
        """The conversation as the model was trained to see it, open for its answer."""
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise UsageError(f"{self.checkpoint}: the chat template refuses the prompt: {message}")

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        environment.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
        special = {name: self._special(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        message = {"role": "user", "content": prompt}
        try:
            return environment.from_string(template).render(
                messages=[message], add_generation_prompt=True, **THINKING, **special
            )
        except TemplateError as error:
            raise UsageError(f"{self.checkpoint}: the chat template cannot be rendered: {one_line(error)}") from error

    def _special(self, name: str) -> str:
        value = self.settings.get(name)
        return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids, special tokens included: a reader wants to see where a side stopped."""
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def piece(self, before: Sequence[int], token: int) -> str:
        """What a token adds to the text before it. Nothing while a character is not complete."""
        whole, old = self.decode([*before, token]), self.decode(before)
        return "" if whole.endswith("\ufffd") else whole[len(old.rstrip("\ufffd")) :]


def _stop(checkpoint: Path) -> frozenset[int]:
    """End-of-sequence ids by generation_config.json, else by config.json."""
    for name in ("generation_config.json", "config.json"):
        found = _json(checkpoint / name).get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        if kept := frozenset(i for i in ids if isinstance(i, int) and not isinstance(i, bool)):
            return kept
    return frozenset()


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a JSON file: {one_line(error)}") from error
    return found if isinstance(found, dict) else {}
