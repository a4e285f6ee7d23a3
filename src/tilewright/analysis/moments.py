"""A mean of singles and the sum of the squares of the distances from it, found in a graph."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.ir.dtype import f32, f64
from tilewright.ir.expr import Expr, axis, cast, const, substitute
from tilewright.ir.graph import Op
from tilewright.ir.sizes import dims


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Op `total` sums the elements, `mean` divides by their number; `squares` sums what `square` makes of each."""

    total: Op
    mean: Op
    square: Op
    squares: Op

    def hold(self) -> bool:
        """Whether the ops are that, and all with the dims of the elements: those reduced have the extent 1."""
        if not (
            is_sum(self.total) and is_quotient(self.mean) and is_square(self.square) and is_sum(self.squares)
        ):
            return False
        total, squares = self.total.expr, self.squares.expr
        assert total is not None and squares is not None
        x, d = total.body[0], squares.body[0]
        if (
            x.op != "read"
            or d.op != "read"
            or x.dtype is not f32
            or self.squares.inputs[operand(d)] is not self.square.output
        ):
            return False
        if total.shape != squares.shape or [a.extent for a in total.reduce] != [
            a.extent for a in squares.reduce
        ]:
            return False
        of_squares = (*squares.axes, *squares.reduce)
        same = {axis(b): axis(a) for a, b in zip((*total.axes, *total.reduce), of_squares, strict=True)}
        return x.args == substitute(d, same).args and self.is_of_mean(x) and self.divides_by_count()

    def is_of_mean(self, x: Expr) -> bool:
        """Whether the distance is that of each element from the mean of those that `x` runs over."""
        total, mean, square = self.total.expr, self.mean.expr, self.square.expr
        assert total is not None and mean is not None and square is not None
        element, near = square.body[0].args[0].args
        source = self.square.inputs[operand(element)] is self.total.inputs[operand(x)]
        if (
            not source
            or self.square.inputs[operand(near)] is not self.mean.output
            or len(x.args) != len(total.axes)
        ):
            return False
        reduced = {axis(a) for a in total.reduce}
        for i, s, d, m in zip(x.args, total.axes, square.axes, near.args, strict=True):
            one = i in reduced or d.extent is dims.ONE
            if (s.extent is dims.ONE) is not one or m is not (dims.ZERO if one else axis(d)):
                return False
            if i not in reduced and i is not (dims.ZERO if one else axis(s)):
                return False
        plain = [dims.ZERO if a.extent is dims.ONE else axis(a) for a in square.axes]
        index = [dims.ZERO if a.extent is dims.ONE else axis(a) for a in mean.axes]
        return list(element.args) == plain and list(mean.body[0].args[0].args) == index

    def divides_by_count(self) -> bool:
        """Whether the mean is the sum over the number of elements."""
        assert self.mean.expr is not None and self.total.expr is not None
        size, by = dims.prod(a.extent for a in self.total.expr.reduce), self.mean.expr.body[0].args[1]
        if by.op == "cast":
            return dims.equal(by.args[0], size)
        return by.op == "const" and by.value == dims.static(size)

    @property
    def count(self) -> Expr:
        """The number of elements of one mean, in f64."""
        assert self.total.expr is not None
        size = dims.prod(a.extent for a in self.total.expr.reduce)
        fixed = dims.static(size)
        return cast(size, f64) if fixed is None else const(fixed, f64)


def operand(element: Expr) -> int:
    """Which operand of its op an element is read from."""
    assert isinstance(element.value, int)
    return element.value


def is_sum(op: Op) -> bool:
    """Whether an op is a plain sum."""
    e = op.expr
    if e is None or e.reduction is None or e.scan is not None or len(op.outputs) != 1:
        return False
    return e.reduction.combiner == "add" and e.reduction.lift[0].op == e.reduction.finish[0].op == "slot"


def is_quotient(op: Op) -> bool:
    """Whether an op divides what it reads by something."""
    if op.expr is None or op.expr.reduction is not None or len(op.inputs) != 1:
        return False
    e = op.expr.body[0]
    return e.op == "div" and e.args[0].op == "read"


def is_square(op: Op) -> bool:
    """Whether an op is the square of the distance of two elements that it reads."""
    if op.expr is None or op.expr.reduction is not None or len(op.outputs) != 1:
        return False
    e = op.expr.body[0]
    return e.op == "mul" and e.args[0] is e.args[1] and is_difference(e.args[0])


def is_difference(e: Expr) -> bool:
    """Whether an element is one single less another."""
    return e.op == "sub" and all(a.op == "read" and a.dtype is f32 for a in e.args)
