"""``harness checkpoint make | convert | inspect | verify``. The command that runs imports torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cases.checkpoints.layout import LAYOUTS
from cases.checkpoints.presets import PRESETS, cut, parse_layers
from harness.types import UsageError

EPILOG = "exit codes of verify: 0 nothing found; 1 findings; 2 unreadable"


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Attach ``checkpoint`` to the subparsers of a command line that calls ``args.command(args)``."""
    parser: argparse.ArgumentParser = commands.add_parser("checkpoint", help="make, convert, inspect or verify one")
    what = parser.add_subparsers(dest="what", required=True, metavar="make | convert | inspect | verify")

    make = what.add_parser("make", help="write a checkpoint of random values, of any size, in bounded memory")
    make.add_argument("folder", metavar="DIR", help="new or empty")
    make.add_argument("--config", choices=tuple(PRESETS), default="tiny", help="sizes (default: tiny)")
    make.add_argument("--layout", choices=tuple(LAYOUTS), required=True)
    make.add_argument("--layers", metavar="0-3|0,2,3", help="only these of the config's layers, renumbered from 0")
    make.add_argument("--experts", metavar="E", help="only this many routed experts a layer")
    make.add_argument("--seed", metavar="N", default="0")
    make.add_argument(
        "--mtp", action="store_true", help="write the next-token-prediction block too, where it has a place"
    )
    make.add_argument("--fp8-scales", choices=("e8m0", "f32"), help="dtype of 128 x 128 scales (default: the layout's)")
    _common(make, _make, shard=True)

    convert = what.add_parser("convert", help="write a checkpoint in another layout, and say what was not exact")
    convert.add_argument("source", metavar="SRC")
    convert.add_argument("folder", metavar="DST", help="new or empty")
    convert.add_argument("--layout", choices=tuple(LAYOUTS), required=True)
    _common(convert, _convert, shard=True)

    inspect = what.add_parser("inspect", help="layout, sizes, layers, tensors by family, shards")
    inspect.add_argument("folder", metavar="DIR")
    _common(inspect, _inspect)

    verify = what.add_parser("verify", help="hold every tensor to the config and look at scales", epilog=EPILOG)
    verify.add_argument("folder", metavar="DIR")
    verify.add_argument("--headers", action="store_true", help="names, dtypes and shapes only; no value is read")
    _common(verify, _verify)
    parser.allow_abbrev = False
    return parser


def _common(parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], int], shard: bool = False) -> None:
    if shard:
        parser.add_argument("--shard-mb", metavar="MB", default="4096", help="largest shard (default: 4096)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.allow_abbrev = False
    parser.set_defaults(command=command)


def _make(args: argparse.Namespace) -> int:
    config = PRESETS[args.config]
    layers = None if args.layers is None else parse_layers(args.layers, config["num_hidden_layers"])
    experts = None if args.experts is None else _whole("--experts", args.experts, 1)
    layout = LAYOUTS[args.layout]
    if args.fp8_scales:
        layout = replace(layout, fp8_scale={"e8m0": "F8_E8M0", "f32": "F32"}[args.fp8_scales])
    if args.mtp and not layout.drafts:
        raise UsageError(
            f"--mtp: expected a layout with DeepSeek's names, came {args.layout}, which has no place for it"
        )
    chosen = cut(config, layers, experts, args.mtp)
    seed, shard_bytes = _whole("--seed", args.seed, 0), _shard_bytes(args)
    from cases.checkpoints.make import make

    total = make(Path(args.folder), chosen, layout, seed=seed, shard_bytes=shard_bytes)
    facts = {
        "folder": args.folder,
        "config": args.config,
        "layout": args.layout,
        "layers": chosen["num_hidden_layers"],
        "experts": chosen["n_routed_experts"],
        "seed": seed,
        "bytes": total,
    }
    if args.json:
        _print_json(facts)
    else:
        print(
            f"{args.folder}: {args.config}, {facts['layers']} layers, {facts['experts']} experts, {args.layout}, "
            f"{total / 1e6:.2f} MB"
        )
    return 0


def _convert(args: argparse.Namespace) -> int:
    shard_bytes = _shard_bytes(args)
    from cases.checkpoints.convert import convert

    report = convert(Path(args.source), Path(args.folder), LAYOUTS[args.layout], shard_bytes)
    if args.json:
        _print_json(report.as_json())
    else:
        print(*report.lines(), sep="\n")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from cases.checkpoints.inspect import inspect

    found = inspect(Path(args.folder))
    if args.json:
        _print_json(found.as_json())
    else:
        print(*found.lines(), sep="\n")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from cases.checkpoints.verify import verify

    report = verify(Path(args.folder), values=not args.headers)
    if args.json:
        _print_json(report.as_json())
    else:
        for finding in report.findings:
            print(finding.line)
        print(
            f"{report.folder}: {report.layout}, {report.tensors} tensors, {report.checked} read; draft block: "
            f"{report.draft}; {len(report.findings) or 'no'} finding{'s' * (len(report.findings) != 1)}"
        )
    return int(bool(report.findings))


def _shard_bytes(args: argparse.Namespace) -> int:
    return _whole("--shard-mb", args.shard_mb, 1) << 20


def _whole(option: str, text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16) or int(text) < least:
        raise UsageError(f"{option}: expected a whole number of at least {least}, came {text!r}")
    return int(text)


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, allow_nan=False)
    print()
