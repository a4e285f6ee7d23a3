"""What a program asked for, behind a faster call in its place: an offer that raises must never fail the program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from torch import Tensor

from tilewright.ir.expr import Expr
from tilewright.ir.graph import Graph, LibraryCall, Op, Operand, Spare, Value

Evaluate = Callable[[Op, Sequence[object], Mapping[Expr, object]], Sequence[object]]
"""The results of an op on operands, with the numbers that sizes have."""


def bound(call: LibraryCall, frozen: Mapping[int, object]) -> LibraryCall:
    """The call with frozen operands in their places, on those that are left."""
    if not frozen:
        return replace(call, task=None)
    count = 1 + max(a.index for a in (*call.args, *(v for _, v in call.kwargs)) if isinstance(a, Operand))
    left = {k: Operand(n) for n, k in enumerate(k for k in range(count) if k not in frozen)}
    put = lambda a: (left.get(a.index) or frozen[a.index]) if isinstance(a, Operand) else a  # noqa: E731
    kwargs = tuple((name, put(a)) for name, a in call.kwargs)
    lies, seen = (tuple(s for k, s in enumerate(of) if k not in frozen) for of in (call.lies, call.seen))
    args = tuple(map(put, call.args))
    return replace(call, args=args, kwargs=kwargs, lies=lies, seen=seen, task=None)


def offered(faster: LibraryCall, captured: LibraryCall, frozen: Mapping[int, object]) -> LibraryCall:
    """The faster call with the captured one behind it."""
    plain = bound(captured, frozen)
    return replace(faster, spare=Spare(plain if faster.rows is None else _on_any_rows(plain, faster.rows)))


def behind(made: LibraryCall, offer: LibraryCall) -> LibraryCall:
    """A way to do an offer, with what stands behind the offer."""
    return replace(made, spare=offer.spare, refused=offer.refused)


def followed(
    spare: Spare | None, start: Value, ops: Sequence[Op], second: tuple[Value, object | None] | None,
    evaluate: Evaluate, made: LibraryCall,
) -> Spare | None:  # fmt: skip
    """A spare whose result, `start`, goes through pointwise ops, as that of the call `made` does. What they read
    besides is `second`: its value, and its tensor if it is frozen (else the last operand). Sizes reach it as arguments:
    those of tensors alone do not tell what they were made of, as that of a window's count."""
    if spare is None or spare.call is None:
        return None

    def run(args: Sequence[object], kwargs: Mapping[str, object], operands: Sequence[object]) -> object:
        *taken, numbers = args
        known: dict[Value, object] = {start: plain.function(*taken, **kwargs)}
        if second is not None:
            known[second[0]] = operands[-1] if second[1] is None else second[1]
        sizes = dict(zip(symbols, cast(Sequence[object], numbers), strict=True))
        for op in ops:
            (known[op.output],) = evaluate(op, [known[v] for v in op.inputs], sizes)
        result = known[ops[-1].output]
        if made.reuses is None or made.reuses < 0:
            return result
        return cast(Tensor, operands[made.reuses]).copy_(cast(Tensor, result))

    plain = spare.call
    symbols = Graph((start,), tuple(ops), ()).symbols()
    count = 1 + max((a.index for a in made.args if isinstance(a, Operand)), default=-1)
    return Spare(_over(replace(plain, args=(*plain.args, tuple(symbols))), run, count))


def one_behind_another(first: Spare | None, second: Spare | None) -> Spare | None:
    """What stands behind a call that does two others: the first on operand 0, the second on what that makes and on the
    other operands."""
    if first is None or second is None or first.call is None or second.call is None:
        return None
    one, other = first.call, second.call
    between, names = object(), tuple(name for name, _ in other.kwargs)

    def run(args: Sequence[object], kwargs: Mapping[str, object], operands: Sequence[object]) -> object:
        del operands
        taken, rest, values = args
        made = one.function(*cast(Sequence[object], taken), **kwargs)
        rest, values = (cast(Sequence[object], _filled(x, between, made)) for x in (rest, values))
        return other.function(*rest, **dict(zip(names, values, strict=True)))

    held = one.args, *(_with(x, between) for x in (other.args, tuple(v for _, v in other.kwargs)))
    return Spare(replace(_over(replace(one, args=held), run, 0), strides=other.strides))


def _with(of: object, between: object) -> object:
    """Arguments with `between` in place of operand 0."""
    return _mapped(of, lambda x: between if x == Operand(0) else x)


def _filled(of: object, between: object, made: object) -> object:
    """Arguments with what was made in the place of `between`."""
    return _mapped(of, lambda x: made if x is between else x)


def _mapped(of: object, change: Callable[[object], object]) -> object:
    """Arguments, changed one by one, in the same lists and tuples."""
    if not isinstance(of, tuple | list):
        return change(of)
    changed = [_mapped(x, change) for x in cast(Sequence[object], of)]
    return changed if isinstance(of, list) else tuple(changed)


def _on_any_rows(plain: LibraryCall, rows: int) -> LibraryCall:
    """A call on [rows, K] for an operand with any leading dims."""

    def run(args: Sequence[object], kwargs: Mapping[str, object], operands: Sequence[object]) -> object:
        x = operands[rows]
        assert isinstance(x, Tensor)
        flat = x.reshape(-1, x.shape[-1])
        out = plain.function(*(flat if a is x else a for a in args), **kwargs)
        assert isinstance(out, Tensor)
        return out.reshape(*x.shape[:-1], out.shape[-1])

    used = [a.index for a in (*plain.args, *(v for _, v in plain.kwargs)) if isinstance(a, Operand)]
    return _over(plain, run, 1 + max(used, default=-1))


_Run = Callable[[Sequence[object], Mapping[str, object], Sequence[object]], object]


def _over(plain: LibraryCall, run: _Run, count: int) -> LibraryCall:
    """A call of `run` with the arguments of `plain`, and with `count` operands as they are."""
    names = tuple(name for name, _ in plain.kwargs)

    def function(args: Sequence[object], values: Sequence[object], operands: Sequence[object]) -> object:
        return run(args, dict(zip(names, values, strict=True)), operands)

    held = plain.args, tuple(v for _, v in plain.kwargs), tuple(map(Operand, range(count)))
    return LibraryCall(plain.name, function, held, strides=plain.strides, reason=plain.reason)
