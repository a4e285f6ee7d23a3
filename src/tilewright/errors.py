"""Every failure that a user can cause, as one small family of exceptions.

An error names the phase that refused, the op and the place in the user's program if known, and one hint:
what to do next. It renders as one line, so that a log or a terminal keeps it whole.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from tilewright.tuning.text_limits import TEXTS

P = ParamSpec("P")
R = TypeVar("R")

_ONCE: set[str] = set()
_SAID: dict[str | tuple[str, type[Warning], int], int] = {}


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn, once of each message unless filters say otherwise. The line of ours that does it would tell nobody
    anything: no line is named, and none is printed."""
    warnings.warn_explicit(message, category, "<tilewright>", 1, module="tilewright", registry=_SAID)


def warn_once(message: str) -> None:
    """Warn of a message if this process has not done so: torch changes the filters of warnings while it compiles, and
    Python forgets then what it said."""
    if message not in _ONCE:
        _ONCE.add(message)
        warn(message)


def near_match(name: str, known: Iterable[str], what: str) -> str:
    """A hint at the name that was perhaps meant; else all of them, as `what` are."""
    names = list(known)
    same = [n for n in names if n.casefold() == name.casefold()]
    close = same or difflib.get_close_matches(name, names, 1)
    return f"did you mean {close[0]!r}?" if close else f"{what} are {', '.join(names)}"


def shown(text: str, most: int) -> str:
    """`text` as it may stand in a log: one line without control characters or changes of direction, and where it has
    more than `most` characters, its beginning and end."""
    if len(text) > most:
        text = f"{text[: most // 2]} ... ({len(text)} characters) ... {text[-most // 4 :]}"
    line = " ".join(text.split())
    return line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


class TilewrightError(Exception):
    """Root of all errors that Tilewright raises on purpose.

    `phase` is the pipeline phase (or `input`, `cli`, ...), `op` the operation concerned, `place` where it
    stands (a source line, a node or a file), `hint` what the user can do. Empty parts are left out.
    """

    def __init__(self, message: str, *, phase: str, op: str = "", place: str = "", hint: str = "") -> None:
        self.message = message
        self.phase = phase
        self.op = op
        self.place = place
        self.hint = hint
        super().__init__(message)

    def __str__(self) -> str:
        """One line: `[phase] message (op X, at Y). Hint: Z`."""
        op, place, hint = (
            shown(part, TEXTS.max_place_characters) for part in (self.op, self.place, self.hint)
        )
        where = [text for text in (op and f"op {op}", place and f"at {place}") if text]
        text = f"[{self.phase}] {shown(self.message.rstrip('.'), TEXTS.max_message_characters)}"
        if where:
            text += f" ({', '.join(where)})"
        if hint:
            text += f". Hint: {hint}"
        return text


class InputError(TilewrightError):
    """A call with wrong inputs: rank, dtype, device, a missing input, a size outside its declared range."""


class NoElements(InputError, IndexError, RuntimeError):
    """An extremum over no elements, an index into none, or a part of another size. Also what eager raises for it."""


class UnknownKeyword(InputError, TypeError):
    """A keyword that a function does not take. Also a TypeError, as Python's own."""


class FixedSize(InputError):
    """A size that was to be left free, and that a trace fixes."""


class ModelError(TilewrightError):
    """A model file that cannot be read: corrupt, truncated, inconsistent or hostile."""


class ArtifactError(TilewrightError):
    """An artifact that is not used: damaged, for another machine or version, or code that nobody vouches for."""

    def __init__(self, message: str, *, op: str = "", place: str = "", hint: str = "") -> None:
        super().__init__(message, phase="load", op=op, place=place, hint=hint)


class UnsupportedError(TilewrightError):
    """Outside what Tilewright does: a library call under `strict`, double backward, an op with no path."""


class SeveralGraphs(UnsupportedError):
    """A program that torch cannot capture as one graph."""


class BuildError(TilewrightError):
    """Generated code that did not build or load; the compiler's first lines stand in the message."""


class KernelRefused(BuildError):
    """Kernels that the compiler behind us refuses; `kernels` are their numbers among those that were built together
    (none: it is not known which)."""

    def __init__(self, message: str, kernels: tuple[int, ...] = ()) -> None:
        hint = "report the model; the option fusion='none' makes other kernels"
        super().__init__(message, phase="build", hint=hint)
        self.kernels = kernels


class SharedMemoryExceeded(KernelRefused):
    """A kernel that needs `needed` bytes of shared memory for a block where there are `limit`."""

    def __init__(self, message: str, kernel: int, needed: int, limit: int) -> None:
        super().__init__(message, (kernel,))
        self.needed, self.limit = needed, limit


class CompilerMissing(BuildError):
    """No usable C++ compiler was found."""


class IllegalSchedule(TilewrightError):
    """A schedule step that a law forbids; `law` names what it would break. Search drops the candidate. `source` is
    the place in the kernel of the op that "a reduction" in the message means (-1: none). What `lasts` is true of every
    kernel that computes and stores as much and more."""

    def __init__(
        self, message: str, *, law: str, source: int = -1, phase: str = "schedule", lasts: bool = False
    ) -> None:
        super().__init__(message, phase=phase)
        self.law, self.source, self.lasts = law, source, lasts

    def __str__(self) -> str:
        """As the base class, with the law at the end."""
        return f"{super().__str__()} [law: {self.law}]"

    def about(self, name: str) -> str:
        """The same with the name of the reduction that it is about."""
        return str(self).replace("a reduction", name, 1)


class IndexOutOfRange(TilewrightError, IndexError):
    """An index taken from data that lies outside its tensor. Also an `IndexError`, as in eager."""


class OutOfMemory(TilewrightError, MemoryError):
    """A device has no memory left for a call. `needed` are the bytes of results and intermediates as far as their sizes
    were known before the call (what library calls need besides is not in it), `free` those that could be had."""

    def __init__(self, device: str, needed: int, free: int, said: str) -> None:
        self.needed = needed
        self.free = free
        super().__init__(
            f"{needed} bytes are needed for results and intermediates, {free} are free on {device} ({said})",
            phase="run",
            hint="smaller inputs, or free tensors first",
        )


class BrokenPromise(TilewrightError):
    """A library call gave something else than the captured program promises for it: another type, shape, device or
    kind. For an op of one's own that is its fake kernel's fault."""


class WrongResult(TilewrightError):
    """Under the option `verify`: a kernel or a library call computed something else than the program means."""


class VerifyError(TilewrightError):
    """An IR value that breaks its own invariants: always a defect of Tilewright, never of the model."""


class CacheWarning(UserWarning):
    """The kernel cache cannot be used (read-only, full, foreign); compiled kernels stay in memory."""


class RecompileWarning(UserWarning):
    """A model was compiled again because a call brought other sizes."""


def names_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """With an error for unknown keywords that names the one which was perhaps meant."""
    known = [p.name for p in inspect.signature(function).parameters.values()]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                hint = near_match(name, known, "its keywords")
                raise UnknownKeyword(f"{function.__name__} takes no {name!r}", phase="input", hint=hint)
        return function(*args, **kwargs)

    return checked
