"""The steps of a plan as closures over one workspace: each takes the list of tensors by buffer number."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import cast

import torch
from torch import Tensor

from tilewright.errors import warn
from tilewright.ir.expr import Expr
from tilewright.ir.graph import LibraryCall, Operand, Spare, bind
from tilewright.ir.sizes.host import Number, number
from tilewright.plan.data import Buffer, CallStep
from tilewright.plan.lazy_allocation import root_of
from tilewright.runtime.cpu.pool import running

from .call_results import Act, Tensors, take_results
from .launch import raise_error
from .seeds import LOOK_FOR_SEEDS, finding_seeds
from .tensors import Make, copy_into

_copy_each: Callable[[list[Tensor], list[Tensor]], None] = getattr(torch, "_foreach_copy_")  # noqa: B009 (torch hides it)


def launching(run: Callable[[], int]) -> Act:
    """Run prepared launch records."""

    def act(tensors: Tensors) -> None:
        del tensors
        code = run()
        if code:
            raise_error(code)

    return act


def alone(acts: Sequence[Act]) -> Sequence[Act]:
    """`acts` as one that leaves everything to the caller's thread, whatever torch would do with it; other threads, and
    the caller's own number of threads, see nothing of it. Without a thread pool they stay as they are."""
    threads = running()
    if not acts or threads is None:
        return acts
    begin, end, count = threads.alone, threads.together, torch.get_num_threads
    together = tuple(acts)

    def act(tensors: Tensors) -> None:
        count()  # when a thread first asks, torch sets what it has
        try:
            begin()
            for each in together:
                each(tensors)
        finally:
            end()

    return (act,)


def sharing(act: Act, core_ns: int) -> Act:
    """`act`, for which one core takes `core_ns` nanoseconds, on several threads; but on the caller's alone for a while
    after threads kept it waiting. Where torch is asked for the same bits in every run, always on several."""
    threads = running()
    if threads is None:
        return act
    begin, end, count = threads.share, partial(threads.shared, core_ns), torch.get_num_threads
    fixed = torch.are_deterministic_algorithms_enabled

    def shared(tensors: Tensors) -> None:
        if fixed() or count() == 1:
            act(tensors)
            return
        try:
            begin()
            act(tensors)
        finally:
            end()

    return shared


def viewing(
    b: int, source: int, shape: Sequence[int], strides: Sequence[int], offset: int, *, leaves: bool
) -> Act:
    """tensors[b] = the memory of `source` with other strides, `offset` elements behind its start. One that `leaves` is
    no view by torch's books: of another result it would ask for the gradients that this one asks for."""
    as_strided = torch.as_strided

    def act(tensors: Tensors) -> None:
        t = tensors[source]
        assert t is not None
        of = t.detach() if leaves else t
        tensors[b] = as_strided(of, shape, strides, t.storage_offset() + offset)

    return act


def copying(target: int, source: int) -> Act:
    """Copy buffer `source` into buffer `target`."""

    def act(tensors: Tensors) -> None:
        t, s = tensors[target], tensors[source]
        assert t is not None and s is not None
        copy_into(t, s)

    return act


def copying_all(pairs: Sequence[tuple[int, int]]) -> Act:
    """Copy each (target, source) pair of buffers: those that lie alike in a few kernels for all, others one by one. No
    target may be memory that another pair reads or writes."""

    def act(tensors: Tensors) -> None:
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for target, source in pairs:
            t, s = tensors[target], tensors[source]
            assert t is not None and s is not None
            if t.dtype is s.dtype and t.is_contiguous() and s.is_contiguous():
                targets.append(t)
                sources.append(s)
            else:
                copy_into(t, s)
        if targets:
            _copy_each(targets, sources)

    return act


def making(
    b: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    make: Make,
    bases: array[int],
) -> Act:
    """Make tensor `b`, unless the caller brought it, and tell the native side where it lies."""

    def act(tensors: Tensors) -> None:
        t = tensors[b]
        if t is None:
            t = tensors[b] = make(shape, strides, dtype)
        bases[b] = t.data_ptr()

    return act


def freeing(buffers: Sequence[int]) -> Act:
    """Forget tensors."""

    def act(tensors: Tensors) -> None:
        for b in buffers:
            tensors[b] = None

    return act


def pointing(b: int, bases: array[int], slot: int) -> Act:
    """Tell the native side where tensor `b` lies."""

    def act(tensors: Tensors) -> None:
        t = tensors[b]
        assert t is not None
        bases[slot] = t.data_ptr()

    return act


def guarding(step: CallStep) -> Act:
    """Copy results that turn out to be memory of an operand."""

    def act(tensors: Tensors) -> None:
        owners = {t.untyped_storage().data_ptr() for i in step.inputs if (t := tensors[i]) is not None}
        for b in step.outputs:
            t = tensors[b]
            if t is not None and t.untyped_storage().data_ptr() in owners:
                tensors[b] = t.clone()

    return act


def calling(step: CallStep, sizes: Mapping[str, Number]) -> Act:
    """Run a library call; its host integers are evaluated now."""
    invoke = _prepared(step.call, step.inputs, sizes)

    def go_on(other: Invoke) -> None:
        nonlocal invoke
        invoke = other

    if step.call.spare is not None:
        invoke = _tried(invoke, step, step.call.spare, sizes, go_on)
    outputs = step.outputs
    name = CALLED + step.call.name
    places = step.call.places or tuple(range(len(outputs)))
    plain = places == tuple(range(len(outputs)))
    if len(outputs) == 1:
        (only,) = outputs

        def one(result: object) -> Tensor:
            return cast(Tensor, take_results(result, places, step)[0])

        def act(tensors: Tensors) -> None:
            try:
                result = invoke(tensors)
            except Exception as error:
                error.add_note(name)
                raise
            tensors[only] = result if isinstance(result, Tensor) else one(result)

        return act

    def act_all(tensors: Tensors) -> None:
        try:
            made = invoke(tensors)
        except Exception as error:
            error.add_note(name)
            raise
        flat = made if plain and isinstance(made, tuple) and len(made) == len(outputs) else None  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        if flat is None or any(isinstance(t, (tuple, list)) for t in flat):  # pyright: ignore[reportUnknownVariableType]
            flat = take_results(made, places, step)
        for b, t in zip(outputs, flat, strict=True):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            tensors[b] = cast(Tensor, t)  # `receiving` looks what it is

    return act_all


Invoke = Callable[[Tensors], object]


def _prepared(call: LibraryCall, inputs: Sequence[int], sizes: Mapping[str, Number]) -> Invoke:
    args = tuple(_fill(a, inputs, sizes) for a in call.args)
    kwargs = {k: _fill(a, inputs, sizes) for k, a in call.kwargs}
    return _invoker(unwrapped(call.function), args, kwargs)


def _tried(
    invoke: Invoke, step: CallStep, spare: Spare, sizes: Mapping[str, Number], go_on: Callable[[Invoke], None]
) -> Invoke:
    """The first run of a call that stands for another one: if it raises, the other one runs, now and later."""

    def first(tensors: Tensors) -> object:
        plain = spare.call
        try:
            made = invoke(tensors)
        except Exception as error:
            if plain is None:
                raise
            other = _prepared(plain, step.inputs, sizes)
            made = other(tensors)  # if this raises as well, it is the program that is wrong
            warn(f"{step.call.name} failed, so {plain.name} runs in its place: {error}", RuntimeWarning)
            go_on(other)
            return made
        spare.release()
        go_on(invoke)
        return made

    return first


CALLED = "in the call "
"""What a note begins with that names the call which raised."""


def unwrapped(function: Callable[..., object]) -> Callable[..., object]:
    """The fastest callable that does the same."""
    if isinstance(function, torch._ops.OpOverload):
        # The wrapper only forwards to it.
        return finding_seeds(function) if function._opname in LOOK_FOR_SEEDS else function._op
    return bind(function)


class _Slot:
    """Stands for the tensor of a buffer in filled arguments."""

    __slots__ = ("buffer",)

    def __init__(self, buffer: int) -> None:
        self.buffer = buffer


def _fill(arg: object, inputs: Sequence[int], sizes: Mapping[str, Number]) -> object:
    """`arg` with its host integers evaluated and operands replaced by slots."""
    match arg:
        case Operand():
            return _Slot(inputs[arg.index])
        case Expr():
            return number(arg, sizes)
        case list():
            return [_fill(a, inputs, sizes) for a in arg]
        case tuple():
            return tuple(_fill(a, inputs, sizes) for a in arg)
        case _:
            return arg


def _has_slot(arg: object) -> bool:
    return isinstance(arg, _Slot) or (isinstance(arg, (list, tuple)) and any(_has_slot(a) for a in arg))


def _resolve(arg: object, tensors: Tensors) -> object:
    if isinstance(arg, _Slot):
        return tensors[arg.buffer]
    if isinstance(arg, list):
        return [_resolve(a, tensors) for a in arg]
    if isinstance(arg, tuple):
        return tuple(_resolve(a, tensors) for a in arg)
    return arg


def _resolver(arg: object) -> Callable[[Tensors], object]:
    """What `_resolve` does for `arg`: a tensor or a list of them directly."""
    if isinstance(arg, _Slot):
        return itemgetter(arg.buffer)
    if isinstance(arg, list):
        places = [a.buffer for a in cast(list[object], arg) if isinstance(a, _Slot)]
        if len(places) == len(cast(list[object], arg)):
            return lambda tensors: [tensors[b] for b in places]
    return partial(_resolve, arg)


def _invoker(
    function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> Callable[[Tensors], object]:
    """`function` on its arguments, as directly as their form allows."""
    if any(_has_slot(a) for a in kwargs.values()):
        return lambda tensors: function(
            *[_resolve(a, tensors) for a in args], **{k: _resolve(a, tensors) for k, a in kwargs.items()}
        )
    leading = [a.buffer for a in args if isinstance(a, _Slot)]
    rest = args[len(leading) :]
    if not all(isinstance(a, _Slot) for a in args[: len(leading)]) or any(_has_slot(a) for a in rest):
        nested = [(i, _resolver(a)) for i, a in enumerate(args) if _has_slot(a)]

        def general(tensors: Tensors) -> object:
            values = list(args)
            for i, resolve in nested:
                values[i] = resolve(tensors)
            return function(*values, **kwargs)

        return general
    if len(leading) == 1:
        (first,) = leading
        return lambda tensors: function(tensors[first], *rest, **kwargs)
    if len(leading) >= 2:
        get = itemgetter(*leading)
        return lambda tensors: function(*get(tensors), *rest, **kwargs)
    return lambda tensors: function(*args, **kwargs)


def independent(copies: Sequence[tuple[int, int]], buffers: Sequence[Buffer]) -> list[list[tuple[int, int]]]:
    """(target, source) pairs in order, in groups of which none writes what another reads or writes."""
    groups: list[list[tuple[int, int]]] = [[]]
    read: set[int] = set()
    written: set[int] = set()
    for pair in copies:
        target, source = (root_of(buffers, b) for b in pair)
        if target in read | written or source in written:
            groups.append([])
            read, written = set(), set()
        groups[-1].append(pair)
        read.add(source)
        written.add(target)
    return groups
