"""``harness bisect``: the arguments. What is chosen is chosen as in ``harness diff``."""

from __future__ import annotations

import argparse
from typing import Any

EPILOG = """exit codes: 0 the logits are right; 1 found; 2 bad input; 3 nothing can be concluded (reference not
certified, logits wrong with every stage swapped, ill-conditioned)"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Attach ``bisect`` to the subparsers of a command line that calls ``args.command(args)``."""
    from harness import cli

    parser: argparse.ArgumentParser = commands.add_parser(
        "bisect", help="which smallest set of production stages breaks the logits", epilog=EPILOG
    )
    parser.add_argument(
        "--layer", metavar="N|A-B|a,b|all", help="search these layers; all others are the reference's (default: all)"
    )
    cli._case_options(parser)
    cli._text_options(parser)
    parser.add_argument("--replace", action="append", default=[], metavar="GLOB=path.py:function")
    parser.add_argument("--backend", action="append", default=[], metavar="GLOB=torch|cuda|best")
    parser.add_argument("--json", metavar="FILE", help="write a JSON line a forward and the result")
    parser.set_defaults(command=_bisect)
    parser.allow_abbrev = False
    return parser


def _bisect(args: argparse.Namespace) -> int:
    from harness import cli

    target = cli._output("--json", args.json)
    case = cli._changed_case(args)
    from harness.bisect import command
    from harness.plan import Request

    request = Request(
        layers=args.layer if args.layer is not None else case.layers,
        modes=("free",),
        replace=tuple(args.replace),
        backend=tuple(args.backend),
    )
    return command.run(case, request, target, cli._out())
