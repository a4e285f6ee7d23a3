"""The callable that users hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from tilewright.errors import InputError
from tilewright.plan.coverage import Coverage
from tilewright.runtime.direct import Direct, key_of

MOST = 512
"""Short ways kept per model."""


class Way(Protocol):
    """How one kind of target is compiled and called."""

    def prepare(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Compile for inputs like these without running."""
        ...

    def __call__(
        self, args: tuple[object, ...], kwargs: dict[str, object], out: Sequence[Tensor] | None
    ) -> tuple[object, Direct | None]:
        """The result, and a short way for calls with the same key if there is one."""
        ...

    def unchanged(self) -> bool:
        """Whether what the short ways rely on besides arguments is still so."""
        ...

    @property
    def coverage(self) -> Coverage | None:
        """Of everything compiled so far."""
        ...

    @property
    def kernels(self) -> tuple[object, ...]:
        """One entry per generated kernel."""
        ...

    @property
    def trace(self) -> object:
        """Every phase's name, time and result, of the graph compiled last."""
        ...


class CompiledModel:
    """Call it as the target: tensors or numpy arrays, by position or by name. `out=` takes one tensor or a tuple that
    receive the outputs."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._short: dict[tuple[object, ...], Direct] = {}

    def __call__(
        self, *args: object, out: Tensor | Sequence[Tensor] | None = None, **kwargs: object
    ) -> object:
        """Run. Raises InputError for inputs that do not fit, and what the program raises."""
        given = None if out is None else (out,) if isinstance(out, Tensor) else tuple(out)
        try:
            key = key_of(args, kwargs)
            short = self._short.get(key)
        except TypeError:
            key = short = None
        if short is not None and self._way.unchanged():
            return short((*args, *kwargs.values()) if kwargs else args, given)
        if self._short and not self._way.unchanged():
            self._short.clear()
        result, found = self._way(args, kwargs, given)
        if found is not None and key is not None:
            if len(self._short) >= MOST:
                self._short.clear()
            self._short[key] = found
        return result

    def prepare(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Compile for inputs like these without running."""
        self._way.prepare(args, kwargs)

    @property
    def coverage(self) -> Coverage:
        """How much runs as generated code; prints as one line. Raises InputError before anything was compiled."""
        found = self._way.coverage
        if found is None:
            raise InputError("nothing is compiled yet", phase="input", hint="call it, or pass example_inputs")
        return found

    @property
    def kernels(self) -> tuple[object, ...]:
        """Generated kernels: name, ops, bytes moved, bytes of the lower bound, flops, source."""
        return self._way.kernels

    @property
    def trace(self) -> object:
        """Every phase's name, time and result."""
        return self._way.trace


def named(names: Sequence[str], args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, ...]:
    """Arguments in the order of `names`. Raises InputError for a missing, doubled or unknown one."""
    if len(args) > len(names):
        raise InputError(f"{len(args)} inputs were given, {len(names)} are taken", phase="input")
    found = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names or name in found:
            what = "is given twice" if name in found else "is no input"
            raise InputError(f"{name!r} {what}", phase="input", hint=f"the inputs are {', '.join(names)}")
        found[name] = value
    missing = [n for n in names if n not in found]
    if missing:
        raise InputError(f"missing input {', '.join(missing)}", phase="input", hint=f"pass {missing[0]}=...")
    return tuple(found[n] for n in names)
