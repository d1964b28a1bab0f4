"""``harness build``: compile the CUDA kernels, with or without a GPU."""

from __future__ import annotations

import argparse
from typing import Any

from harness.types import UsageError


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Attach ``build`` to the subparsers of a command line that calls ``args.command(args)``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "build",
        help="compile the CUDA kernels; needs nvcc, no GPU",
        epilog="exit 2: no nvcc, wrong arch, a failed compile",
    )
    parser.add_argument("--arch", default="sm_90a", help="what to compile for (default: sm_90a)")
    parser.set_defaults(command=_build)
    parser.allow_abbrev = False
    return parser


def _build(args: argparse.Namespace) -> int:
    """Where the shared object is and which kernels spill registers; exit 1 if one does."""
    from production.cuda import loader

    try:
        built = loader.build(args.arch)
    except ValueError as error:
        raise UsageError(f"build: {' '.join(str(error).split())}") from error
    spilled = {kernel: size for kernel, size in built.spills.items() if size}
    print(f"{'compiled' if built.fresh else 'found'} {built.path}")
    print(f"{built.arch}, sources {built.sources}, {len(built.spills)} kernels, {len(spilled)} spill registers")
    for kernel, size in spilled.items():
        print(f"    {kernel}: {size} bytes")
    return 1 if spilled else 0
