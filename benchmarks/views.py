"""The share of a run that goes into records and the page. Prints CPU seconds as JSON.

python -m benchmarks.views LAYERS
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import jsonl, views
from harness.cli import main as harness
from harness.dump import Keeper  # noqa: F401  (torch is imported before the clock starts to matter)

SPENT = {"records": 0.0, "page": 0.0}


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any) -> Any:
        start = time.process_time()
        try:
            return function(*args)
        finally:
            SPENT[name] += time.process_time() - start

    return wrapped


def main() -> None:
    jsonl.Writer.write = timed("records", jsonl.Writer.write)  # type: ignore[method-assign]
    views._html = timed("page", views._html)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        files = ["--json", str(Path(folder) / "run.jsonl"), "--html", str(Path(folder) / "run.html")]
        code = harness(["diff", "--layer", sys.argv[1], *files])
        sizes = {f"{f.suffix[1:]} bytes": f.stat().st_size for f in Path(folder).iterdir()}
    print(json.dumps({**SPENT, "total": time.process_time(), **sizes}))
    sys.exit(code)


if __name__ == "__main__":
    main()
