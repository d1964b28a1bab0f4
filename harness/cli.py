"""The command line: ``harness diff | generate | list | report | checkpoint | faults | build | doctor``.

Only argument parsing happens here. torch, transformers and rich are imported by the command that needs them, so that
``--help``, ``list cases`` and usage errors answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import io
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from harness import __version__, generate
from harness.tally import INVALID, USAGE
from harness.types import InvalidRun, UsageError

if TYPE_CHECKING:
    from harness.views import Files

EPILOG = """exit codes: 0 every row passes; 1 a stage fails; 2 bad input; 3 the comparison means nothing (reference not
certified, ill-conditioned, interrupted)"""


#: commands from outside, as import strings of functions that attach a parser: the harness itself knows no checkpoint
EXTENSIONS = (
    "harness.bisect.cli:add_parser",
    "cases.checkpoints.cli:add_parser",
    "cases.faults.cli:add_parser",
    "cases.kernels.cli:add_parser",
)


class Parser(argparse.ArgumentParser):
    """Reports wrong arguments as every other bad input is reported: one line, exit 2."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parser().parse_args(words)
        return int(args.command(args))
    except UsageError as error:
        print(f"harness: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE
    except InvalidRun as error:
        print(f"harness: INVALID: {' '.join(str(error).split())}", file=sys.stderr)
        return INVALID
    except KeyboardInterrupt:  # outside a run, which keeps its records and ends by itself
        print("harness: interrupted", file=sys.stderr)
        return INVALID
    except SystemExit as stop:  # argparse's --help and --version
        return stop.code if isinstance(stop.code, int) else 0
    except MemoryError as error:
        print(f"harness: out of memory: {error or 'take fewer layers, --length or --batch'}", file=sys.stderr)
        return USAGE


def entry() -> NoReturn:
    """The console script."""
    import gc

    from harness.early import Signals

    gc.set_threshold(100_000, 50, 50)  # importing torch and transformers makes a million objects that all stay
    Signals.last = True
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an ASCII terminal, a file name that is no text
    sys.exit(main())


def _parser() -> Parser:
    parser = Parser(prog="harness", description="Compare a production model with its reference, stage by stage.")
    parser.add_argument("--version", action="version", version=f"harness {__version__}")
    commands = parser.add_subparsers(
        dest="name", required=True, metavar="diff | generate | list | report | checkpoint | faults | build | doctor"
    )

    diff = commands.add_parser("diff", help="compare stages and name the first fault", epilog=EPILOG)
    diff.set_defaults(command=_diff)
    diff.add_argument("--layer", metavar="N|A-B|a,b|all", help="layers to compare (default: the case's, mostly all)")
    diff.add_argument("--stage", action="append", default=[], metavar="GLOB", help="only these stages; repeatable")
    diff.add_argument("--mode", choices=("local", "free", "both"), default="both")
    _case_options(diff)
    _text_options(diff)
    diff.add_argument("--bypass", action="append", default=[], metavar="GLOB=production|reference|direct")
    diff.add_argument("--direct-residual", action="store_true", help="direct on every hyper-connection and mix")
    diff.add_argument(
        "--phase",
        metavar="prefill|chunk:SIZES|decode:K",
        help="with caches: compare the last call (default: the case's)",
    )
    diff.add_argument("--replace", action="append", default=[], metavar="GLOB=path.py:function")
    diff.add_argument("--backend", action="append", default=[], metavar="GLOB=torch|cuda|best")
    diff.add_argument("--isolate", action="store_true", help="every production stage in a process of its own")
    diff.add_argument(
        "--diagnose", choices=("first", "all", "none"), default="first", help="failing local rows to explain"
    )
    diff.add_argument("--dump", metavar="DIR", help="write the first fault's (or --stage's) tensors and a repro.py")
    _view_options(diff, json=True)

    generation = commands.add_parser("generate", help="follow both sides through a text, token by token", epilog=EPILOG)
    generation.set_defaults(command=_generate)
    _case_options(generation)
    generation.add_argument("--prompt", metavar="TEXT", help="by the checkpoint's tokenizer and chat template")
    generate.add_options(generation)
    _view_options(generation, json=True)

    listing = commands.add_parser("list", help="what there is to compare")
    what = listing.add_subparsers(dest="what", required=True, metavar="stages | cases | components")
    stages = what.add_parser("stages", help="inputs, outputs and parameters of every stage")
    stages.add_argument("--layer", metavar="N|A-B|a,b|all", default="all")
    stages.add_argument("--json", action="store_true", help="as JSON")
    _case_options(stages)
    stages.set_defaults(command=_list_stages)
    what.add_parser("cases", help="bundled cases").set_defaults(command=_list_cases)
    components = what.add_parser("components", help="the code under test and its rounding plans")
    _case_options(components)
    components.set_defaults(command=_list_components)

    report = commands.add_parser("report", help="views of a run, or what got worse from one to another")
    report.add_argument("runs", nargs="+", metavar="RUN.jsonl", help="two of them: exit 1 if the second is worse")
    _view_options(report, json=False)
    report.set_defaults(command=_report)

    for extension in EXTENSIONS:
        module, _, attach = extension.partition(":")
        getattr(importlib.import_module(module), attach)(commands)
    commands.add_parser("doctor", help="is everything here that a run needs?").set_defaults(command=_doctor)
    for each in (parser, diff, generation, listing, stages, components, report):
        each.allow_abbrev = False
    return parser


def _case_options(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--case", metavar="NAME|FILE", help="a bundled case or a TOML file (default: tiny)")
    source.add_argument("--checkpoint", metavar="DIR", help="a checkpoint folder, with the default case's text")


def _text_options(parser: argparse.ArgumentParser) -> None:
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", metavar="TEXT", help="text, by the checkpoint's tokenizer")
    text.add_argument("--tokens", metavar="ID,ID,...", help="token ids")
    parser.add_argument("--length", metavar="S", help="repeat or cut the tokens to this many")
    parser.add_argument("--batch", metavar="B", help="rows; row b is the sequence rotated by 7 b")
    parser.add_argument("--dtype", choices=("native", "fp32"), help="fp32 tells a logic error from rounding")


def _view_options(parser: argparse.ArgumentParser, *, json: bool) -> None:
    if json:
        parser.add_argument("--json", metavar="FILE", help="write the records as JSON lines")
    parser.add_argument("--html", metavar="FILE", help="write a page that opens offline")
    parser.add_argument("--junit", metavar="FILE", help="write JUnit XML")
    parser.add_argument(
        "--step-summary", metavar="FILE", help="append markdown (default: $GITHUB_STEP_SUMMARY, if it is set)"
    )


def _case(args: argparse.Namespace) -> Any:
    from harness import case

    if args.checkpoint is not None:
        return case.of_checkpoint(args.checkpoint)
    return case.load(args.case or "tiny")


def _changed_case(args: argparse.Namespace) -> Any:
    """The case with the text options of the command line."""
    changes = {
        "prompt": args.prompt,
        "tokens": None if args.tokens is None else _tokens(args.tokens),
        "length": _whole("--length", args.length),
        "batch": _whole("--batch", args.batch),
        "dtype": args.dtype,
    }
    given = [
        word
        for name in ("prompt", "tokens", "length", "batch", "dtype")
        if getattr(args, name) is not None
        for word in (f"--{name}", str(getattr(args, name)))
    ]
    if args.layer is not None:
        from harness import select

        select.ranges(args.layer)  # before anything is loaded
    case = _case(args).override(**changes)
    return case.override(argument=(*case.argument, *given))


def _diff(args: argparse.Namespace) -> int:
    files = _files(args)
    case = _changed_case(args)
    request = {
        "layers": args.layer if args.layer is not None else case.layers,
        "stages": tuple(args.stage),
        "modes": ("local", "free") if args.mode == "both" else (args.mode,),
        "bypass": tuple(args.bypass),
        "replace": tuple(args.replace),
        "backend": tuple(args.backend),
        "direct_residual": args.direct_residual,
        "diagnose": args.diagnose,
        "isolate": args.isolate,
        "phase": args.phase if args.phase is not None else case.phase,
    }
    from harness.diff import diff

    return diff(case, request, files, _out())


def _generate(args: argparse.Namespace) -> int:
    wish, files = generate.wish(args), _files(args)
    changes = {"prompt": args.prompt, "dtype": args.dtype, "batch": 1}
    given = [w for n in ("prompt", "dtype") if getattr(args, n) is not None for w in (f"--{n}", getattr(args, n))]
    case = _case(args).override(**changes)
    case = case.override(argument=(*case.argument, *given))
    from harness.generate.command import run

    return run(case, wish, files, _out())


def _tokens(text: str) -> tuple[int, ...]:
    words = text.replace(",", " ").split()
    if not words:
        raise UsageError("--tokens is empty; expected at least one token id")
    for word in words:
        if not (word.isascii() and word.isdigit() and len(word) < 19):
            raise UsageError(f"--tokens: expected ids of 0 and up, such as 3,17,4; got {word!r}")
    return tuple(map(int, words))


def _whole(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10) or int(text) < 1:
        raise UsageError(f"{option}: expected a whole number of at least 1, got {text!r}")
    return int(text)


def _output(option: str, text: str | None) -> Path | None:
    """An output path that can be written, checked before any work is done."""
    import os

    if text is None:
        return None
    path = Path(text)
    if "\0" in text or not text:
        raise UsageError(f"{option}: {text!r} is not a file name")
    if not path.parent.is_dir():
        raise UsageError(
            f"{option} {shlex.quote(text)}: the folder {str(path.parent)!r} does not exist; create it first"
        )
    if path.is_dir():
        raise UsageError(f"{option} {shlex.quote(text)} is a folder; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {shlex.quote(text)} cannot be written: permission denied")
    return path


def _folder(option: str, text: str | None) -> Path | None:
    """A folder that exists, or that can be made in one that does."""
    import os

    if text is None:
        return None
    if path := Path(text) if text and "\0" not in text and Path(text).is_dir() else None:
        if not os.access(path, os.W_OK):
            raise UsageError(f"{option} {shlex.quote(text)} cannot be written: permission denied")
        return path
    if text and "\0" not in text and Path(text).exists():
        raise UsageError(f"{option} {shlex.quote(text)} is a file; name a folder")
    return _output(option, text)


def _files(args: argparse.Namespace) -> Files:
    """Where to write what, checked before any work is done."""
    from harness.views import Files, step_summary_file

    named = {
        name: _output(f"--{name.replace('_', '-')}", getattr(args, name, None))
        for name in ("json", "html", "junit", "step_summary")
    }
    named["step_summary"] = step_summary_file(named["step_summary"])
    return Files(**named, dump=_folder("--dump", getattr(args, "dump", None)))


def _out() -> Any:
    from harness.early import Output

    return Output(sys.stdout)


def _list_stages(args: argparse.Namespace) -> int:
    from harness import listing

    return listing.stages(_case(args), args.layer, args.json, _out())


def _list_cases(args: argparse.Namespace) -> int:
    from harness import listing

    return listing.cases(_out())


def _list_components(args: argparse.Namespace) -> int:
    from harness import listing

    return listing.components(_case(args), _out())


def _report(args: argparse.Namespace) -> int:
    from harness import views

    runs, files = [Path(run) for run in args.runs], _files(args)
    if len(runs) == 1:
        return views.show(runs[0], files, _out())
    if len(runs) > 2:
        raise UsageError(f"report: expected one run to show or two to compare, got {len(runs)}")
    if files.html or files.junit:
        raise UsageError("report: --html and --junit show one run; with two, only what got worse is printed")
    return views.compare(runs[0], runs[1], files, _out())


def _doctor(args: argparse.Namespace) -> int:
    from harness.doctor import doctor

    return doctor(_out())
