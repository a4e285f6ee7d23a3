"""`tune`: lets clocks decide for so many seconds, and writes what they found to a file that others compile with."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from tilewright import measure
from tilewright.errors import InputError
from tilewright.options import PREFIX
from tilewright.report.write import check_writable
from tilewright.runtime.call.model import CompiledModel
from tilewright.runtime.stats import STATS
from tilewright.runtime.store.tuned import TuningSession, tuning
from tilewright.runtime.store.tuning_file import TuningFile, read
from tilewright.tuning.timing_limits import TUNING

from .request import CommandRequest, ExitCode
from .show import Cell
from .work import compile_for, options_of, prepared, threads_of

_BUDGET = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|)")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def seconds_of(budget: str) -> float:
    """The seconds of `60s`, `1.5m`, `1h` or `60`. Raises InputError for anything else."""
    match = _BUDGET.fullmatch(budget.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match is not None else -1.0
    if not 0 <= seconds <= TUNING.max_budget_seconds:
        hint = "a number of seconds, 0 or more, as 60, 60s, 1.5m or 1h"
        raise InputError(f"a budget cannot be {budget!r}", phase="cli", op="--budget", hint=hint)
    return seconds


@dataclass(slots=True)
class _Output:
    """The file, with what it held before."""

    path: Path
    before: TuningFile
    now: Callable[[], float] = time.monotonic
    _written: float = field(default=0.0)

    def write(self, found: TuningFile) -> None:
        """With what others have written meanwhile. Raises InputError where that cannot be done."""
        now = read(self.path)
        self.before = self.before.merged(now) if isinstance(now, TuningFile) else self.before
        try:
            self.before.merged(found).write(self.path)
        except OSError as error:
            raise InputError(
                f"the file cannot be written: {error.strerror}", phase="cli", op="-o", place=str(self.path)
            ) from error
        self._written = self.now()

    def keep(self, found: TuningFile) -> None:
        """Write, if it is time to. What cannot be written now is told at the end."""
        if self.now() - self._written >= TUNING.seconds_between_writes:
            with suppress(InputError):
                self.write(found)


def tune_model(request: CommandRequest, output: str, budget: str) -> int:
    """Compile and run, as often as that finds something more in the time; the file is whole at any moment."""
    seconds, path = seconds_of(budget), Path(output)
    check_writable(path)
    before, note = _file_before(path)
    if note:
        request.screen.line(note, "yellow", verdict=True)
    asked = _tuning_request(request, path if before.devices else None, seconds)
    kept = _Output(path, before)
    with request.progress(f"loading {request.model}"):
        model, chosen = prepared(request)  # what we add to it is no wish of the user's
    if isinstance(model.target, CompiledModel):
        raise InputError(
            "an artifact is compiled already",
            phase="cli",
            op=request.model,
            hint="tune the model that it was made of",
        )
    session = TuningSession(seconds, lambda: kept.keep(session.found))
    first = STATS.timed
    try:
        with (
            tuning(session),
            request.progress(f"tuning {request.model}"),
            measure.settings(threads_of(request)),
        ):
            for turn in range(TUNING.max_turns):
                known = STATS.timed
                compiled = compile_for(asked, model, chosen.inputs)
                if turn == 0:
                    compiled(*chosen.inputs)
                    coverage = str(compiled.coverage)
                    request.screen.facts["coverage"] = coverage
                if not (session.unsettled and session.left and STATS.timed > known):
                    break
    finally:  # interrupted, or refused: what was found stays
        kept.write(session.found)
        _show(request, session, kept, STATS.timed - first)
    return ExitCode.OK


def _file_before(path: Path) -> tuple[TuningFile, str]:
    """What the file holds already, and what is to be said of it. Raises InputError for a file that is none of ours:
    it is not overwritten."""
    if not path.exists():
        return TuningFile(), ""
    found = read(path)
    if isinstance(found, TuningFile):
        return found, ""
    if not found.other:
        raise InputError(
            f"no tuning file is overwritten that cannot be read: {found.reason}", phase="cli", op="-o",
            place=str(path), hint="remove it, or name another one",
        )  # fmt: skip
    return TuningFile(), f"{path} is written anew: {found.reason}"


def _tuning_request(request: CommandRequest, known: Path | None, seconds: float) -> CommandRequest:
    """The request with as much time as the budget allows, and with what is known. Raises InputError for options that
    time nothing."""
    if not options_of(request).measure:
        raise InputError("nothing is timed without the option measure", phase="cli", op="--option")
    options = [*request.options, f"tune_seconds={int(-(-seconds // 1))}"]
    if known is not None:
        options.append(f"tuning_file={known.resolve()}")
    return replace(request, options=tuple(options))


def _show(request: CommandRequest, session: TuningSession, kept: _Output, timed: int) -> None:
    """How many entries of which kind there are, and how to use them."""
    found, screen, path = session.found, request.screen, kept.path
    counts = {
        device: Counter(name.partition(" ")[0] for name in entries)
        for device, entries in found.devices.items()
    }
    rows: list[Sequence[Cell]] = [
        (device, kind, count) for device, kinds in counts.items() for kind, count in sorted(kinds.items())
    ]
    if rows:
        screen.table("choices", ("device", "of", "choices"), rows)
    here, whole = (sum(map(len, file.devices.values())) for file in (found, kept.before.merged(found)))
    left = f"; more time would settle {len(session.unsettled)} more" if session.unsettled else ""
    screen.line(
        f"{path}: {here} choices of {request.model}, {timed} timed now{left}; {whole} in the file",
        verdict=True,
    )
    screen.line(f"use it with {PREFIX}TUNING_FILE={path}, or options={{'tuning_file': {str(path)!r}}}")
    screen.facts |= {
        "output": str(path), "timed": timed, "unsettled": len(session.unsettled),
        "choices": {device: dict(kinds) for device, kinds in counts.items()},
    }  # fmt: skip
