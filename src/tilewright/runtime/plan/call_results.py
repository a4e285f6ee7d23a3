"""What a library call gave, held against what the captured program promised, which is all that the plan knows of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.errors import BrokenPromise
from tilewright.plan.data import CallStep

from .tensors import lay_out, same_layout

Tensors = list[Tensor | None]
Act = Callable[[Tensors], None]


@dataclass(frozen=True, slots=True)
class Promise:
    """A result: element type, device, and, where its sizes are known, shape and strides (elements; None for a tensor
    that has none)."""

    dtype: torch.dtype
    device: torch.device
    rank: int
    shape: tuple[int, ...] | None
    strides: tuple[int, ...] | None


def take_results(made: object, places: Sequence[int], step: CallStep) -> list[object]:
    """The results of a call at `places`, counted through nested lists. Raises BrokenPromise if there are fewer."""
    flat = _flat(made) if isinstance(made, (tuple, list)) else [made]
    if places and max(places) >= len(flat):
        raise BrokenPromise(
            f"{max(places) + 1} results were promised, {len(flat)} came", phase="run", op=step.call.name,
            place=step.place, hint=HINT,
        )  # fmt: skip
    return [flat[k] for k in places]


def _flat(made: Sequence[object]) -> list[object]:
    out: list[object] = []
    for x in made:
        if isinstance(x, (tuple, list)):
            out += _flat(x)  # pyright: ignore[reportUnknownArgumentType]
        else:
            out.append(x)
    return out


HINT = "the op's fake kernel (or its registration) says something else than its real one does"


def receiving(step: CallStep, k: int, promise: Promise, *, by_kernels: bool = True) -> Act:
    """Hold result `k` of a call against its promise. What is only wider or laid otherwise is brought into form: types
    that hold every value of another, strides. Anything else is refused, as its readers would read other memory. What no
    kernel reads may be a number in the host's memory: some ops leave the state of a generator there, and their
    gradients look for it there."""
    b = step.outputs[k]
    dtype, shape, strides = promise.dtype, promise.shape, promise.strides

    def act(tensors: Tensors) -> None:
        t = tensors[b]
        if not isinstance(t, Tensor) or t.dtype is not dtype or t.device != promise.device:
            if not by_kernels and shape == () and _is_host_number(t, dtype):
                return
            t = tensors[b] = _converted(t, step, k, promise)
        if shape is None:
            if t.dim() != promise.rank:
                raise _broken(step, k, f"has {t.dim()} dims, {promise.rank} were promised")
        elif t.shape != shape:
            raise _broken(step, k, f"has the shape {tuple(t.shape)}, {shape} was promised")
        elif strides is not None and t.stride() != strides and not same_layout(shape, t.stride(), strides):
            tensors[b] = lay_out(t, strides)

    return act


def counting(step: CallStep, k: int) -> Act:
    """Hold result `k` of a call, which is a host scalar, against that."""
    b = step.outputs[k]

    def act(tensors: Tensors) -> None:
        found: object = tensors[b]
        if not isinstance(found, (bool, int, float)):
            raise _broken(step, k, f"is {_shown(found)}, a number was promised")

    return act


def _converted(t: object, step: CallStep, k: int, promise: Promise) -> Tensor:
    if not isinstance(t, Tensor):
        raise _broken(step, k, f"is {_shown(t)}, a tensor was promised")
    if t.device != promise.device:
        raise _broken(step, k, f"is on {t.device}, {promise.device} was promised")
    if not _holds(promise.dtype, t.dtype):
        raise _broken(step, k, f"is {t.dtype}, {promise.dtype} was promised")
    return t.to(promise.dtype)


def _is_host_number(t: object, dtype: torch.dtype) -> bool:
    return isinstance(t, Tensor) and t.is_cpu and not t.dim() and t.dtype is dtype


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every number of type `narrow` is one of type `wide`, and means the same."""
    alike = wide.is_floating_point == narrow.is_floating_point and wide.is_complex == narrow.is_complex
    return alike and torch.bool not in (wide, narrow) and torch.promote_types(wide, narrow) == wide


def _broken(step: CallStep, k: int, what: str) -> BrokenPromise:
    return BrokenPromise(f"result {k} {what}", phase="run", op=step.call.name, place=step.place, hint=HINT)


def _shown(x: object) -> str:
    return "nothing" if x is None else f"a {type(x).__name__}"
