"""What ends a command early: a signal, a reader that has gone away, a full disk behind the standard output.

A run must keep its records whichever happens, so a signal waits until the record in hand is written, and output that
nobody reads any more is dropped while files are still to be written.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, TextIO

from harness.types import UsageError


class Stopped(BaseException):
    """SIGINT, SIGTERM or a closed pipe: end the run, keep what is there."""


class Signals:
    """Within it, the first SIGINT or SIGTERM raises Stopped; later ones are ignored: the run is ending already."""

    #: the process ends with the command: an impatient Ctrl-C must not hit the interpreter while it shuts down
    last = False

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._busy = self._pending = self._stopped = False

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
            self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            for number in self._before:
                signal.signal(number, self._stop)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            if not (self._stopped and self.last):
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        for each in self._before:
            signal.signal(each, signal.SIG_IGN)
        self._stopped = True
        if not self._busy:
            raise Stopped
        self._pending = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let what is inside finish before a signal is obeyed."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
        if self._pending:
            self._pending = False
            raise Stopped


class Output:
    """Standard output for a command. When its reader is gone (``| head``) the rest is dropped without a word.

    With ``needed`` the text is all that the command is for: then it stops instead of working for nobody.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.needed = False
        self.closed_early = False

    def write(self, text: str) -> int:
        return self._try(lambda: self._out.write(text)) or 0

    def flush(self) -> None:
        self._try(self._out.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)

    def _try(self, action: Any) -> Any:
        if self.closed_early:
            return None
        try:
            return action()
        except OSError as error:
            self.closed_early = True
            self._discard()
            if error.errno != errno.EPIPE:
                raise UsageError(f"cannot write the output: {error.strerror}; send it elsewhere") from error
            if self.needed:
                raise Stopped from error
            return None

    def _discard(self) -> None:
        """What is buffered still would fail again when the interpreter ends: let it go nowhere."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._out.fileno())
            os.close(nowhere)
