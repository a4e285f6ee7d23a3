"""What a call is given: which sizes it has, whether it fits, and the caller's own tensors for results."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree

from tilewright.errors import InputError, UnsupportedError
from tilewright.ir.expr import Symbol
from tilewright.ir.sizes.dims import symbols_of
from tilewright.ir.sizes.host import Number, number
from tilewright.plan.data import Binding, Plan, Spec
from tilewright.plan.data import Part as Where

from .tensors import copy_into, memory_range, repeats_memory, torch_dtype

Argument = Tensor | int | float | bool


_FAKE = torch._C._TorchDispatchModeKey.FAKE
_modes = torch._C._len_torch_dispatch_stack
_mode_of = torch._C._get_dispatch_mode


def in_dual_level() -> bool:
    """Whether torch may follow tangents."""
    return forward_ad._current_level >= 0


def check_surroundings(args: Sequence[object]) -> None:
    """Raise UnsupportedError where something around a call wants what kernels do not do: follow tangents, or only say
    of results what they would be. Cheap where nothing is around."""
    if in_dual_level():
        check_tangents(args)
    if _modes() and _mode_of(_FAKE) is not None:
        _refuse_fake("under FakeTensorMode")


def check_real(args: Sequence[object]) -> None:
    """Raise UnsupportedError for a tensor that has no memory, or one that only another library reads: kernels would
    read some that is not theirs."""
    if any(isinstance(t, FakeTensor) for t in args):
        _refuse_fake("with a fake tensor")
    for k, t in enumerate(args):
        if isinstance(t, Tensor) and t.layout is not torch.strided:
            raise UnsupportedError(
                f"input {k} is kept as {t.layout}", phase="run", place=f"input {k}",
                hint="bring a dense tensor: `.to_dense()`",
            )  # fmt: skip


def _refuse_fake(how: str) -> None:
    raise UnsupportedError(
        f"a compiled graph was called {how}", phase="run",
        hint="its results are numbers in memory: call the program that is not compiled, or real tensors",
    )  # fmt: skip


def check_tangents(args: Sequence[object]) -> None:
    """Raise UnsupportedError for a tensor that carries a tangent of forward-mode differentiation: kernels see none."""
    if any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in args):
        raise UnsupportedError(
            "a compiled graph was differentiated in forward mode", phase="run",
            hint="compile what calls torch.func.jvp, or take the function that is not compiled",
        )  # fmt: skip


def check_placed(plan: Plan, sizes: Mapping[str, Number], args: Sequence[Argument]) -> None:
    """Raise InputError unless inputs whose storage is addressed by place begin where they did when compiled."""
    for k, offset in plan.placed:
        t, wanted = args[k], number(offset, sizes)
        if isinstance(t, Tensor) and t.storage_offset() != wanted:
            raise InputError(
                f"input {k} begins at element {t.storage_offset()} of its storage, which the program reads by place",
                phase="input", place=f"input {k}", hint=f"it was compiled for element {wanted}",
            )  # fmt: skip


def symbols_of_plan(plan: Plan) -> list[Symbol]:
    """The size symbols of the inputs."""
    found: dict[Symbol, None] = {}
    for given in plan.inputs:
        for e in (*given.shape, *given.strides) if isinstance(given, Spec) else (given,):
            found |= {s.value: None for s in symbols_of(e) if isinstance(s.value, Symbol)}
    return list(found)


def reader_of(b: Binding) -> Callable[[Sequence[Argument]], int]:
    """What finds the integer of a binding among the inputs."""
    k, d = b.input, b.dim
    match b.part:
        case Where.SCALAR:
            return lambda args: args[k]  # pyright: ignore[reportReturnType]
        case Where.SIZE:
            return lambda args: args[k].shape[d]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownLambdaType]
        case Where.STRIDE:
            return lambda args: args[k].stride(d)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownLambdaType]


def solve(
    bindings: Sequence[Binding],
    args: Sequence[Argument],
    readers: Sequence[Callable[[Sequence[Argument]], int]],
) -> dict[str, Number]:
    """The value of every symbol. Raises InputError where a size is no multiple of what it must be."""
    sizes: dict[str, Number] = {}
    for b, read in zip(bindings, readers, strict=True):
        found = read(args)
        scale, shift = number(b.scale, sizes), number(b.shift, sizes)
        if scale == 0:
            raise InputError(
                f"nothing determines the size {b.symbol}", phase="input", place=f"input {b.input}"
            )
        value, rest = divmod(found - shift, scale) if scale != 1 or shift else (found, 0)
        if rest:
            raise InputError(
                f"{b.part.value} {b.dim} of input {b.input} is {found}, it must be {scale} times a size plus {shift}",
                phase="input", place=f"input {b.input}",
            )  # fmt: skip
        sizes[b.symbol] = value
    return sizes


def check_tensor(k: int, spec: Spec, a: object, device: str) -> None:
    """Raise InputError unless argument `k` is the tensor that `spec` describes, on `device`."""
    place = f"input {k}"
    if not isinstance(a, Tensor):
        raise InputError(
            f"input {k} must be a tensor, not {type(a).__name__}", phase="input", place=place,
            hint="give a tensor, or only arrays",
        )  # fmt: skip
    wanted = torch_dtype(spec.dtype)
    if a.dtype != wanted:
        raise InputError(
            f"input {k} has dtype {a.dtype}, {wanted} is needed",
            phase="input",
            place=place,
            hint=f"convert it to {wanted}",
        )
    if str(a.device) != device:
        raise InputError(
            f"input {k} is on {a.device}, this was compiled for {device}", phase="input", place=place,
            hint=f"move it with .to({device!r})",
        )  # fmt: skip
    if a.dim() != len(spec.shape):
        raise InputError(
            f"input {k} has {a.dim()} dims, {len(spec.shape)} are needed", phase="input", place=place,
            hint="compile the model for inputs like this one",
        )  # fmt: skip


def check_out(k: int, given: object, dtype: torch.dtype, device: str, shape: tuple[int, ...] | None) -> None:
    """Raise InputError unless the caller's tensor `k` can take a result."""
    place = f"out {k}"
    if not isinstance(given, Tensor):
        hint = "give a tensor for each output"
        raise InputError(
            f"out {k} must be a tensor, not {type(given).__name__}", phase="input", place=place, hint=hint
        )
    if given.dtype != dtype or str(given.device) != device:
        raise InputError(
            f"out {k} is {given.dtype} on {given.device}, {dtype} on {device} is needed", phase="input", place=place,
            hint="give a tensor as the program returns it, or none",
        )  # fmt: skip
    if shape is not None and tuple(given.shape) != shape:
        raise InputError(
            f"out {k} has the shape {tuple(given.shape)}, the output has {shape}", phase="input", place=place,
            hint="give a tensor of that shape",
        )  # fmt: skip
    if repeats_memory(given):
        hint = "give one whose elements have memory of their own"
        raise InputError(
            f"out {k} holds one element at several places", phase="input", place=place, hint=hint
        )


def told_of_writes(plan: Plan) -> Callable[[Sequence[Argument]], None] | None:
    """What tells torch that a call has written into some of its arguments; None where it writes into none."""
    changed = [k for k, spec in enumerate(plan.inputs) if k in plan.changed and isinstance(spec, Spec)]
    if not changed:
        return None
    pick: Callable[[Sequence[Argument]], Any] = itemgetter(*changed)
    return lambda args: increment_version(pick(args))


def deliver(result: object, out: Sequence[Tensor], inputs: Sequence[Tensor]) -> object:
    """Copy the tensors of `result` (nested as the program returned it) into `out`, and return it with those instead.

    Raises InputError as a plan does that writes into `out` itself."""
    leaves, spec = pytree.tree_flatten(result)
    at = [k for k, x in enumerate(leaves) if isinstance(x, Tensor)]
    if len(at) != len(out):
        hint = "give a tensor for each output"
        raise InputError(f"out has {len(out)} tensors, there are {len(at)} outputs", phase="input", hint=hint)
    ranges = [(f"input {k}", memory_range(t)) for k, t in enumerate(inputs)]
    for place, (k, given) in enumerate(zip(at, out, strict=True)):
        made = leaves[k]
        check_out(place, given, made.dtype, str(made.device), tuple(made.shape))
        check_apart(place, given, ranges)
    for k, given in zip(at, out, strict=True):
        copy_into(given, leaves[k].detach())
        leaves[k] = given
    return pytree.tree_unflatten(leaves, spec)


def check_apart(k: int, given: Tensor, ranges: list[tuple[str, tuple[int, int]]]) -> None:
    """Raise InputError if `given` meets memory in `ranges`; add it to them."""
    low, high = memory_range(given)
    for what, (a, z) in ranges:
        if a < high and low < z:
            raise InputError(
                f"out {k} overlaps {what}", phase="input", place=f"out {k}", hint="give each its own memory"
            )
    ranges.append((f"out {k}", (low, high)))
