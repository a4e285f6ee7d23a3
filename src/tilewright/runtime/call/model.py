"""The callable that users hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils import _pytree as pytree

from tilewright.arrays import as_arrays, only_arrays, tensor_of_array
from tilewright.capture.described import Signature, TensorInfo
from tilewright.errors import InputError, TilewrightError, UnsupportedError
from tilewright.plan.coverage import Coverage
from tilewright.tuning.input_limits import GRAPHS

from .around.user_frames import without_our_frames
from .fast_path import LONG_WAY, Direct, Short, key_of
from .reports import Reports

Out = Tensor | np.ndarray
"""What receives one output."""


def receivers(out: object) -> tuple[Tensor, ...]:
    """What receives the outputs, as tensors over its own memory. Raises InputError for anything else."""
    found: list[Tensor] = []
    for k, x in enumerate(out if isinstance(out, (tuple, list)) else (out,)):
        made = tensor_of_array(x, f"out {k}") if isinstance(x, np.ndarray) else x
        if not isinstance(made, Tensor):
            raise InputError(
                f"out {k} is a {type(x).__name__}",
                phase="input",
                place=f"out {k}",
                hint="pass a tensor or an array",
            )
        if isinstance(x, np.ndarray) and x.size and made.data_ptr() != x.ctypes.data:
            raise InputError(
                f"out {k} is an array that no tensor can share", phase="input", place=f"out {k}",
                hint="pass a writable array without negative strides, in the machine's byte order",
            )  # fmt: skip
        found.append(made)
    return tuple(found)


class TargetWay(Reports, Protocol):
    """How one kind of target is compiled and called."""

    def prepare(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Compile for inputs like these without running."""
        ...

    def __call__(
        self, args: tuple[object, ...], kwargs: dict[str, object], out: Sequence[Tensor] | None
    ) -> tuple[object, Short | None]:
        """The result, and a short way for calls with the same key if there is one."""
        ...

    def unchanged(self) -> bool:
        """Whether what the short ways rely on besides arguments is still so."""
        ...

    def copied(self, memo: dict[int, object]) -> TargetWay:
        """The way of a deep copy of the target. Raises UnsupportedError where there is none."""
        ...

    @property
    def source(self) -> Callable[..., object] | None:
        """What a program that is traced takes in where it calls this one; None: it cannot be traced."""
        ...

    @property
    def title(self) -> str:
        """What is compiled, in a few words."""
        ...

    @property
    def done(self) -> Coverage | None:
        """Of what was compiled so far; compiles nothing."""
        ...

    @property
    def device(self) -> torch.device | None:
        """Where arrays are brought; None: they stay on the CPU."""
        ...

    @property
    def coverage(self) -> Coverage | None:
        """Of everything compiled so far."""
        ...

    @property
    def signature(self) -> Signature | None:
        """What the graph compiled last takes and gives; None before anything was compiled."""
        ...


class CompiledModel:
    """Call it as the target: tensors or numpy arrays, by position or by name. `out=` takes one tensor or array, or a
    tuple of them, that receive the outputs.

    A call that brings arrays and no tensor returns arrays, with ml_dtypes' element types for bfloat16 and float8.
    Arrays that torch cannot view as they lie (read-only ones, negative strides, another byte order) are copied: what
    a program writes to its argument then stays in the copy."""

    def __init__(self, way: TargetWay) -> None:
        self._way = way
        self._short: dict[tuple[object, ...], Short] = {}
        self._known: dict[tuple[object, ...], Callable[..., object]] = {}
        self._calls: tuple[Callable[..., object], ...] = ()
        """Native functions for some calls, those made last first."""

    @property
    def way(self) -> TargetWay:
        """How the target is compiled and called."""
        return self._way

    def __copy__(self) -> CompiledModel:
        """Another callable of the same target."""
        return CompiledModel(self._way)

    def __deepcopy__(self, memo: dict[int, object]) -> CompiledModel:
        """A copy of the target with weights of its own, which compiles when it is first called. Weights that were
        frozen are shared."""
        return CompiledModel(self._way.copied(memo))

    def __reduce__(self) -> NoReturn:
        """Refused: machine code belongs to its process. Raises UnsupportedError."""
        raise UnsupportedError(
            "a compiled model cannot be pickled", phase="input",
            hint="pickle what you compiled, and compile it where it is loaded (warm caches make that quick)",
        )  # fmt: skip

    def __call__(self, /, *args: object, out: Out | Sequence[Out] | None = None, **kwargs: object) -> object:
        """Run. Raises InputError for inputs that do not fit, and what the program raises."""
        return self._enter(*args, out=out, **kwargs)

    def _enter(self, /, *args: object, out: Out | Sequence[Out] | None = None, **kwargs: object) -> object:
        """The same as a method, which Python calls faster than an object."""
        if is_compiling() and out is None and self._way.source is not None:
            return self._way.source(*args, **kwargs)
        try:
            if out is None:
                for call in self._calls:
                    result = call(*args, **kwargs)
                    if result is not LONG_WAY:
                        return result
            return self._look_up(args, kwargs, out)
        except TilewrightError:
            raise
        except Exception as error:
            error.__traceback__ = without_our_frames(error.__traceback__)
            raise

    def _look_up(
        self, args: tuple[object, ...], kwargs: dict[str, object], out: Out | Sequence[Out] | None
    ) -> object:
        """Run what is kept for such calls, or else all of the way."""
        given = None if out is None else (out,) if isinstance(out, Tensor) else receivers(out)
        key, short = self._find(args, kwargs)
        if key is not None:
            return self._run(args, kwargs, given, key, short)
        arrays = only_arrays((*args, out), kwargs)  # they have no key, their tensors do
        args, kwargs = self._converted(args, kwargs)
        result = self._run(args, kwargs, given, *self._find(args, kwargs))
        return as_arrays(result) if arrays else result

    def _run(
        self,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        out: Sequence[Tensor] | None,
        key: tuple[object, ...] | None,
        short: Short | None,
    ) -> object:
        if short is not None and self._stands(short):
            result = short((*args, *kwargs.values()) if kwargs else args, out)
            if result is not LONG_WAY:
                if key is not None and isinstance(short, Direct):
                    self._shorten(key, short, args, kwargs)
                return result
        elif short is not None or (self._short and not self._way.unchanged()):
            self._short.clear()
            self._known.clear()
            self._calls = ()
        result, found = self._way(args, kwargs, out)
        if found is not None and key is not None:
            if len(self._short) >= GRAPHS.max_short_ways:
                self._short.clear()
            self._short[key] = found
        return result

    def _stands(self, short: Short) -> bool:
        """Whether what a short way relies on besides arguments is still so. Each is asked itself: the target's way may
        meanwhile serve what has changed, for a copy of this model or for another thread."""
        return short.unchanged() if isinstance(short, Direct) else self._way.unchanged()

    def _shorten(
        self, key: tuple[object, ...], short: Direct, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Make a native function for calls like one that just went a short way, where there is none as short."""
        call = short.known_call(key, args, kwargs)
        if call is not None:
            self._known.pop(key, None)
            while len(self._known) >= GRAPHS.max_known_calls:
                self._known.pop(next(iter(self._known)))
            self._known[key] = call
            self._calls = tuple(reversed(self._known.values()))

    def _converted(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments with tensors for arrays, however nested."""
        device = self._way.device

        def tensors(value: object, place: str) -> object:
            def leaf(x: object) -> object:
                if not isinstance(x, (np.ndarray, np.generic)):
                    return x
                made = tensor_of_array(np.asanyarray(x), place)
                return made if device is None else made.to(device)

            # Who brings no arrays gets back into his own lists and dicts what the program puts there.
            arrays = any(isinstance(x, (np.ndarray, np.generic)) for x in pytree.tree_leaves(value))
            return pytree.tree_map(leaf, value) if arrays else value

        return (
            tuple([tensors(a, f"input {k}") for k, a in enumerate(args)]),
            {name: tensors(a, f"input {name}") for name, a in kwargs.items()},
        )

    def _find(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...] | None, Short | None]:
        """The key of a call (None where it has none) and the short way for it."""
        try:
            key = key_of(args, kwargs)
            return key, self._short.get(key)
        except TypeError:
            return None, None

    def prepare(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Compile for inputs like these without running."""
        self._way.prepare(*self._converted(args, kwargs))

    @property
    def coverage(self) -> Coverage:
        """How much runs as generated code; prints as one line. Raises InputError before anything was compiled."""
        found = self._way.coverage
        if found is None:
            raise InputError("nothing is compiled yet", phase="input", hint="call it, or pass example_inputs")
        return found

    def __repr__(self) -> str:
        done = self._way.done
        return f"<CompiledModel of {self._way.title}: {'not compiled yet' if done is None else done}>"

    def _repr_html_(self) -> str:
        """A small table for notebooks; compiles nothing."""
        from tilewright.report.notebook import table  # when somebody looks

        done = self._way.done
        return table(self._way.title, done, () if done is None else self._way.compilations)

    @property
    def signature(self) -> Signature:
        """What the graph compiled last takes and gives, and its free sizes. Raises InputError before anything was
        compiled."""
        found = self._way.signature
        if found is None:
            raise InputError("nothing is compiled yet", phase="input", hint="call it, or pass example_inputs")
        return found

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """Name, element type and shape of each tensor that it takes; free sizes by name."""
        return self.signature.inputs

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """The same of what it gives."""
        return self.signature.outputs

    @property
    def kernels(self) -> tuple[object, ...]:
        """Generated kernels: name, ops, bytes moved, bytes of the lower bound, flops, source."""
        return self._way.kernels

    @property
    def calls(self) -> tuple[object, ...]:
        """What runs besides kernels: name, ops, how (own routine, library by choice or by need), reason, results."""
        return self._way.calls

    @property
    def cuda_graphs(self) -> tuple[str, ...]:
        """One line for each graph on a GPU under `cuda_graphs`: how many CUDA graphs replay, or why none does."""
        return self._way.cuda_graphs

    @property
    def trace(self) -> object:
        """Every phase's name, time and result."""
        return self._way.trace

    @property
    def compilations(self) -> tuple[object, ...]:
        """How each graph of it was compiled so far: coverage, trace, kernels and calls. (`tilewright.compilations()`
        has those of the whole process.)"""
        return self._way.compilations

    def report(self, path: str | os.PathLike[str] | None = None) -> str:
        """All of that as one HTML page that opens offline: the graph, each kernel with its source and schedule, bytes
        against bounds, memory, phases. Also written to a file, if a path is given. Raises InputError before anything
        was compiled."""
        from tilewright.report.write import model_page  # templates are read when somebody asks

        return model_page(self._way.title, self.compilations, self.signature, path)
