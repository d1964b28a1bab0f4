"""Whether the Hugging Face code that runs is the code that was installed.

Comparing composed stages with the model's own forward finds a patched decoder layer, but not a patched norm: both sides
would call it. So every function of the modules concerned is compared, as bytecode, with a fresh compilation of its
source file, the file with the digest in the installation's record, and the model's instances are searched for
overridden forwards and foreign hooks.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import transformers
from transformers import activations, modeling_rope_utils

from reference import hf

MODULES: tuple[Any, ...] = (hf.modeling, hf.masking, activations, modeling_rope_utils)
#: decorators may come from these folders; a wrapper from anywhere else is a patch
TRUSTED = tuple(str(Path(package.__file__ or "").parent) for package in (transformers, torch))


def changes(model: Any) -> Iterator[str]:
    """One line for each thing that is not as installed; nothing for an unmodified model."""
    for module in MODULES:
        yield from _recorded(module)
        yield from _functions(module)
    for name, expected in (("torch", torch), ("nn", torch.nn), ("F", torch.nn.functional)):
        if getattr(hf.modeling, name, expected) is not expected:
            yield f"{hf.modeling.__name__}.{name} is not torch's"
    yield from _instances(model)


def _functions(module: ModuleType) -> Iterator[str]:
    for qualname, originals in _compiled(module.__file__ or "").items():
        live = _resolve(module, qualname)
        if live is None:
            yield f"{module.__name__}: {qualname} is gone or no function"
            continue
        while hasattr(live, "__wrapped__"):
            if not live.__code__.co_filename.startswith(TRUSTED):
                yield f"{module.__name__}: {qualname} is wrapped by {live.__code__.co_filename}"
            live = live.__wrapped__
        if live.__code__ not in originals:
            yield f"{module.__name__}: {qualname} runs code from {live.__code__.co_filename}, not the installed one"


def _resolve(module: ModuleType, qualname: str) -> Any:
    """The live function behind a dotted name, taken out of a property, static or class method."""
    value: Any = module
    for part in qualname.split("."):
        value = inspect.getattr_static(value, part, None)
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)
    return value if isinstance(value, FunctionType) else None


@functools.cache
def _compiled(path: str) -> dict[str, list[CodeType]]:
    """Functions of a source file, at module level and in classes, by dotted name, as Python compiles them now.

    A name may be defined in several branches; then any of its definitions will do.
    """
    found: dict[str, list[CodeType]] = {}

    def walk(code: CodeType) -> None:
        for inner in code.co_consts:
            if not isinstance(inner, CodeType) or inner.co_name.startswith("<"):
                continue
            if inner.co_flags & inspect.CO_NEWLOCALS:  # a function; a class body has no such flag
                found.setdefault(inner.co_qualname, []).append(inner)
            else:
                walk(inner)

    walk(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True))
    return found


def _recorded(module: ModuleType) -> Iterator[str]:
    """Compare a source file with the digest that the installer recorded, where there is one."""
    path = Path(module.__file__ or "")
    relative = path.relative_to(Path(TRUSTED[0]).parent).as_posix()
    expected = _record().get(relative)
    digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
    if expected is not None and digest != expected:
        yield f"{path} differs from the file that was installed"


@functools.cache
def _record() -> dict[str, str]:
    """Digests of the installed transformers files; empty for an installation without a record."""
    try:
        files = importlib.metadata.files("transformers") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {str(file): file.hash.value for file in files if file.hash is not None and file.hash.mode == "sha256"}


def _instances(model: Any) -> Iterator[str]:
    for name, module in model.named_modules():
        kind = type(module)
        if not kind.__module__.startswith(("transformers.", "torch.")):
            yield f"{name or 'the model'} is a {kind.__module__}.{kind.__qualname__}"
        for attribute in ("forward", "__call__", "_apply_gate"):
            if attribute in module.__dict__:
                yield f"{name or 'the model'} has a {attribute} of its own"
        if module._forward_hooks or module._forward_pre_hooks:
            yield f"{name or 'the model'} has hooks that are not the harness's"
