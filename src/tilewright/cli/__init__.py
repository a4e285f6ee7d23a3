"""The command line: `tilewright VERB MODEL`. Its entry point stands here, where little is imported before it runs."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import os
import signal
import sys
import threading

__all__ = ["main"]


def main() -> None:
    """Entry point of the command `tilewright`. It ends without taking torch's modules apart, which takes seconds, and
    with the exit code that was told: Python itself ends by the signal where an interruption went through its `exec`."""
    _open_streams()
    code = _code_of_verb()
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends already
    # Python's own end does the same first; both names are as old as 3.9.
    for end in (getattr(threading, "_shutdown", None), getattr(atexit, "_run_exitfuncs", None)):
        if end is not None:
            end()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _open_streams() -> None:
    """Make stdout and stderr take whatever is written. A terminal of few characters shows others as escapes. What goes
    to a stream that was closed before the start is lost, and no file that is opened later gets its number."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # it lives as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _code_of_verb() -> int:
    """Run what the arguments say. An interruption while modules are imported is told in one line, too."""
    try:
        command = importlib.import_module("tilewright.cli.command")
        command.cli(prog_name="tilewright", obj=command.OWN_PROCESS)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT  # as shells count
    return 0
