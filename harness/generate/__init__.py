"""``harness generate``: both sides through a generation, token by token, each with its own caches.

This module holds the options alone: like the rest of the command line it imports nothing that takes time.
"""

from __future__ import annotations

import argparse
from typing import Any

from harness.types import UsageError

#: Reasoning models think for thousands of tokens before they answer.
MAX_NEW_TOKENS = 4096
MOST = 1 << 20


def add_options(parser: argparse.ArgumentParser) -> None:
    """What ``generate`` understands beside a case and views."""
    parser.add_argument("--max-new-tokens", default=str(MAX_NEW_TOKENS), metavar="N", help=f"default: {MAX_NEW_TOKENS}")
    parser.add_argument("--temperature", default="0", metavar="T", help="0 (default): the likeliest token")
    parser.add_argument("--seed", default="0", metavar="N", help="of the samples, which are the same on both sides")
    parser.add_argument("--side", choices=("both", "production", "reference"), default="both")
    parser.add_argument(
        "--follow", choices=("reference", "own"), default="reference", help="whose token each side goes on with"
    )
    parser.add_argument("--dtype", choices=("native", "fp32"), help="fp32 tells a logic error from rounding")
    parser.add_argument("--bypass", action="append", default=[], metavar="GLOB=production|reference|direct")
    parser.add_argument("--direct-residual", action="store_true", help="direct on every hyper-connection and mix")
    parser.add_argument("--replace", action="append", default=[], metavar="GLOB=path.py:function")


def wish(args: argparse.Namespace) -> dict[str, Any]:
    """The options, checked, under the names of ``harness.generate.run.Wish``."""
    return {
        "max_new_tokens": _whole("--max-new-tokens", args.max_new_tokens, 1),
        "temperature": _temperature(args.temperature),
        "seed": _whole("--seed", args.seed, 0),
        "side": args.side,
        "follow": args.follow,
        "bypass": tuple(args.bypass),
        "replace": tuple(args.replace),
        "direct_residual": args.direct_residual,
    }


def _whole(option: str, text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit()) or not least <= int(text) <= MOST:
        raise UsageError(f"{option}: expected a whole number from {least} to {MOST}, got {text!r}")
    return int(text)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise UsageError(f"--temperature: expected a number from 0 to 100, got {text!r}")
    return value
