"""Ops that replace elements of their first operand, and what does the same where it lies.

The op in place computes each new element as the other one does, in the same order where places repeat. It looks at the
places one by one, so that one outside the tensor would be found when others are stored: on the CPU all are looked at
before. A GPU's kernels end the process's context there, in eager mode as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch._ops import OpOverload

from tilewright.errors import IndexOutOfRange
from tilewright.ir.dtype import i32, i64
from tilewright.ir.graph import LineAt, Operand, Routine, Value
from tilewright.ir.sizes import dims

aten = torch.ops.aten


class IndexForm(Enum):
    """Which argument says where elements go."""

    LIST = "a list of indices, one for each of the first dims, or masks; negative ones count from the end"
    LINES = "the index along a dim, from 0 on"
    SIGNED_LINES = "the index along a dim; negative ones count from the end"


_IN_PLACE: dict[OpOverload, tuple[OpOverload, IndexForm]] = {
    aten.index_put.default: (aten.index_put_.default, IndexForm.LIST),
    aten.index_copy.default: (aten.index_copy_.default, IndexForm.LINES),
    aten.index_add.default: (aten.index_add_.default, IndexForm.LINES),
    aten.index_fill.int_Scalar: (aten.index_fill_.int_Scalar, IndexForm.SIGNED_LINES),
    aten.index_fill.int_Tensor: (aten.index_fill_.int_Tensor, IndexForm.SIGNED_LINES),
    aten.scatter.src: (aten.scatter_.src, IndexForm.LINES),
    aten.scatter.value: (aten.scatter_.value, IndexForm.LINES),
    aten.scatter_add.default: (aten.scatter_add_.default, IndexForm.LINES),
}
"""By the law above, for these arguments: (tensor, indices, values, ...), and (tensor, dim, index, values, ...)."""


def in_place_of(target: object) -> Callable[..., object] | None:
    """What does the same as op `target` in the memory of its first operand, or nothing where it raises."""
    found = _IN_PLACE.get(target) if isinstance(target, OpOverload) else None
    return None if found is None else OverFirst(*found)


def line_of(target: object, args: Sequence[object], inputs: Sequence[Value]) -> LineAt | None:
    """What a call of op `target` replaces, if that is one line of its first operand whose number is a tensor of one
    element. `inputs` are the tensors for which `Operand`s stand in `args`."""
    found = _IN_PLACE.get(target) if isinstance(target, OpOverload) else None
    if found is None or not args or args[0] != Operand(0):
        return None
    line: LineAt | None = None
    match args[1:]:
        case (int(dim), Operand(index), Operand(source)) if found[0] is aten.index_copy_.default:
            line = LineAt(dim % max(1, len(inputs[0].shape)), index, source, signed=False)
        case ([*places], Operand(source), *more) if found[0] is aten.index_put_.default and more in (
            [],
            [False],
        ):
            given = [(d, x.index) for d, x in enumerate(places) if isinstance(x, Operand)]
            if len(given) == 1:
                line = LineAt(*given[0], source, signed=True)
        case _:
            pass
    return line if line is not None and _is_one_line(line, inputs) else None


def _is_one_line(line: LineAt, inputs: Sequence[Value]) -> bool:
    whole, index, source = inputs[0], inputs[line.index], inputs[line.source]
    one = len(index.shape) <= 1 and index.numel is dims.ONE and index.dtype in (i32, i64)
    return (
        one
        and source.dtype is whole.dtype
        and line.dim < len(whole.shape)
        and 0 not in (line.index, line.source)
        and _fits(source, whole, line.dim, drops=line.signed and not index.shape)
    )


def _fits(source: Value, whole: Value, dim: int, *, drops: bool) -> bool:
    """Whether `source` is broadcast to one line of `whole` along `dim`, which the line lacks if it `drops` it. Torch's
    fake kernels take other shapes as well; the op itself refuses them."""
    line = [dims.ONE if d == dim else n for d, n in enumerate(whole.shape) if not (drops and d == dim)]
    if len(source.shape) > len(line):
        return False
    shown = line[len(line) - len(source.shape) :]
    return all(n is dims.ONE or dims.equal(n, m) for n, m in zip(source.shape, shown, strict=True))


def over_first(function: object) -> OverFirst | None:
    """What stands for an op in place; None for an op that is not one of those above."""
    return next((OverFirst(*found) for found in _IN_PLACE.values() if found[0] is function), None)


@dataclass(frozen=True, slots=True)
class OverFirst(Routine):
    """An op that replaces elements of its first operand where they lie, once all places are known to be inside."""

    function: OpOverload
    places: IndexForm

    def bind(self) -> Callable[..., object]:
        """What runs."""
        function, check = self.function, _CHECKS[self.places]

        def run(whole: Tensor, *args: object, **kwargs: object) -> object:
            if whole.is_cpu:
                check(whole, *args)
            return function(whole, *args, **kwargs)

        return run


def _check_list(whole: Tensor, indices: Sequence[Tensor | None], *_: object) -> None:
    d = 0
    for index in indices:
        if index is None:
            d += 1
        elif index.dtype in (torch.bool, torch.uint8):
            d += index.dim()  # as many places as the mask has, which are inside it
        else:
            _check(index, -whole.shape[d], whole.shape[d])
            d += 1


def _check_lines(whole: Tensor, dim: int, index: Tensor, *_: object) -> None:
    _check(index, 0, whole.shape[dim] if whole.dim() else 1)


def _check_signed(whole: Tensor, dim: int, index: Tensor, *_: object) -> None:
    size = whole.shape[dim] if whole.dim() else 1
    _check(index, -size, size)


_CHECKS: dict[IndexForm, Callable[..., None]] = {
    IndexForm.LIST: _check_list,
    IndexForm.LINES: _check_lines,
    IndexForm.SIGNED_LINES: _check_signed,
}


def _check(index: Tensor, low: int, high: int) -> None:
    if not index.numel():
        return
    least, most = (int(t) for t in index.aminmax())
    if least < low or most >= high:
        raise IndexOutOfRange(
            f"index {least if least < low else most} is out of bounds for a size of {high}", phase="run",
            hint="nothing was written",
        )  # fmt: skip
