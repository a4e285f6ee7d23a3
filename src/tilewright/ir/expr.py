"""Scalar and index expressions: frozen, interned, typed. Equal expressions are the same object.

Two readings share one class. A *body* computes an element from reads of tensors; an *index expression* (dtype i64)
computes where a read goes. Index arithmetic is kept in a normal form by `ir.sizes.dims`; build it with the functions
there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from .dtype import DType, Kind, bool_, f32, i64

Const = bool | int | float | Fraction


@dataclass(frozen=True, slots=True)
class Symbol:
    """An unknown size: its `name` and the inclusive range [low, high] (high None = unbounded)."""

    name: str
    low: int = 0
    high: int | None = None


class HashMemo:
    """Room for the hash of what is a key of many tables."""

    __slots__ = ("hash_memo",)
    hash_memo: int


@dataclass(frozen=True, slots=True)
class Axis(HashMemo):
    """A loop variable of a tensor expression; it takes the values 0 .. extent - 1."""

    name: str
    extent: Expr

    def __hash__(self) -> int:
        try:
            return self.hash_memo
        except AttributeError:
            object.__setattr__(self, "hash_memo", hash((self.name, self.extent)))
            return self.hash_memo


@dataclass(frozen=True, slots=True)
class Slot:
    """A placeholder in the declaration of a reduction: element or state number `index` of `side`."""

    side: str
    index: int


@dataclass(frozen=True, slots=True)
class OfProgram:
    """The mark of a sum or product that a program wrote: it wraps around where it exceeds an int64. What the compiler
    makes itself is a place or a size, and exact."""


OF_PROGRAM = OfProgram()
Leaf = Const | Symbol | Axis | Slot | OfProgram | tuple[int, int] | int | None


class Expr:
    """One node: `op`, `args`, `dtype`, and `value` for leaves (constant, symbol, axis, slot; a read's operand
    number) and marks."""

    __slots__ = (
        "__weakref__",
        "args",
        "below_memo",
        "bounds_memo",
        "dtype",
        "identity_memo",
        "linear_memo",
        "op",
        "reach_memo",
        "value",
        "written_memo",
    )
    op: str
    args: tuple[Expr, ...]
    dtype: DType
    value: Leaf
    linear_memo: dict[tuple[Expr, ...], int] | None
    bounds_memo: tuple[Expr | None, Expr | None] | None
    below_memo: tuple[Expr, ...] | None
    identity_memo: bytes | None
    reach_memo: object
    written_memo: int

    def __repr__(self) -> str:
        return show(self)

    def __deepcopy__(self, memo: dict[int, object]) -> Expr:
        return self


_interned: dict[tuple[object, ...], weakref.KeyedRef[tuple[object, ...], Expr]] = {}


def _forget(dead: weakref.KeyedRef[tuple[object, ...], Expr]) -> None:
    if _interned.get(dead.key) is dead:
        del _interned[dead.key]


def make(op: str, args: tuple[Expr, ...], dtype: DType, value: Leaf = None) -> Expr:
    """The one constructor of `Expr`: returns the existing node if an equal one is alive."""
    # A type's name stands for it: hashing text takes no call of ours.
    key = (op, args, dtype.name, type(value), repr(value) if isinstance(value, float) else value)
    known = _interned.get(key)
    found = known() if known is not None else None
    if found is not None:
        return found
    node = Expr()
    node.op, node.args, node.dtype, node.value = op, args, dtype, value
    node.linear_memo = node.bounds_memo = node.below_memo = node.identity_memo = node.reach_memo = None
    node.written_memo = 0
    _interned[key] = weakref.KeyedRef(node, _forget, key)
    return node


@dataclass(frozen=True, slots=True)
class Scalar:
    """A scalar operation: number of arguments and the rule of its result type.

    `result` is "same" (type of the first argument), "bool", "branch" (type of the second), or "given" (stated, as by
    a cast). `cost` is in vector instructions; it guides recomputation only.
    """

    arity: int
    result: str = "same"
    cost: int = 1


SCALARS: dict[str, Scalar] = {
    **{name: Scalar(2) for name in ("add", "sub", "mul", "maximum", "minimum", "and", "or", "xor")},
    **{name: Scalar(2, cost=4) for name in ("shl", "shr", "div")},
    **{name: Scalar(2, cost=12) for name in ("floordiv", "mod", "truncdiv", "fmod")},
    **{name: Scalar(2, "bool") for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: Scalar(2, cost=40) for name in ("pow", "atan2")},
    **{name: Scalar(1) for name in ("neg", "abs", "not", "floor", "ceil", "trunc", "round", "sign")},
    **{name: Scalar(1, cost=8) for name in ("sqrt", "rsqrt", "reciprocal")},
    **{name: Scalar(1, "bool") for name in ("isnan", "isinf")},
    **{name: Scalar(1, cost=12) for name in ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p")},
    **{name: Scalar(1, cost=16) for name in ("tanh", "sigmoid", "erf", "erfc", "sin", "cos")},
    **{
        name: Scalar(1, cost=40)
        for name in ("tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh")
    },
    "coarse_tanh": Scalar(1, cost=12),
    "coarse_erfc": Scalar(1, cost=8),
    "close_exp": Scalar(1, cost=12),
    "close_div": Scalar(2, cost=8),
    **{name: Scalar(1, cost=12) for name in ("quick_exp2", "quick_log2", "quick_erfc", "quick_tanh")},
    "fma": Scalar(3),
    "where": Scalar(3, "branch"),
    "cast": Scalar(1, "given"),
    "narrow": Scalar(1, "given"),
}
"""Every scalar operation. Printers call a function of the same name, so no printer keeps a table of its own.

A `coarse_` function has a relative error of at most 2^-11, what rounding to float16 makes; it stands where the program
has a result in half precision, on machines that have it as one instruction or nearly so. That of `coarse_erfc`, in the
place of 1 +- erf as a factor of such a result, is 2^-15, and where it is below 2^-17 its absolute error is 2^-31.

A `quick_` function stands where a kernel folds exponentials of products of halves: its absolute error (of a logarithm
or tangent) or relative one (of a power) is at most 2^-21, and a power below the smallest normal number is 0.
`quick_erfc`, in the place of 1 +- erf, has an absolute error of 2^-23, less than that sum has, and a relative one of
2^-16 in its tail.

`close_exp` is `exp` with a relative error of at most 2^-22 on machines where that of `exp` grows with its argument; it
stands in kernels that read no halves, whose own rounding hides such errors. `close_div` is `div` with one rounding
there.

`fma` is a * b + c of floats with one rounding, as machines have it; on a machine without it, two, which is what the
program itself does there. Nothing makes one of a product and a sum, nor those of one, unless the result is the same.

`cast` is a conversion that the source program wrote; `narrow` is one that a declaration adds to give its result the
program's type, and a kernel that keeps the value may leave it out."""

SPECIAL_COST = SCALARS["exp"].cost
"""The cost from which on an operation goes to the units for special functions, where a machine has such."""


def const(value: Const, dtype: DType) -> Expr:
    """The constant `value`, brought to the Python type that `dtype` holds exactly (Fraction stays exact)."""
    if dtype.kind is Kind.BOOL:
        return make("const", (), dtype, bool(value))
    if dtype.kind is not Kind.FLOAT:
        return make("const", (), dtype, int(value))
    return make("const", (), dtype, value if isinstance(value, Fraction) else float(value))


@lru_cache(1 << 12)
def integer(value: int) -> Expr:
    """An index constant."""
    return make("const", (), i64, int(value))


@lru_cache(1 << 14)
def axis(of: Axis) -> Expr:
    """The index expression that is the loop variable `of`."""
    return make("axis", (), i64, of)


def symbol(name: str, low: int = 0, high: int | None = None) -> Expr:
    """The size symbol `name` with its range."""
    return make("symbol", (), i64, Symbol(name, low, high))


def slot(side: str, index: int, dtype: DType) -> Expr:
    """Placeholder number `index` of `side` in a reduction's declaration."""
    return make("slot", (), dtype, Slot(side, index))


def read(operand: int, index: Iterable[Expr], dtype: DType) -> Expr:
    """An element of operand number `operand` at `index`. Under a `where` it is only performed on the taken side."""
    return make("read", tuple(index), dtype, operand)


def call(op: str, *args: Expr, dtype: DType | None = None) -> Expr:
    """Apply scalar operation `op`; arguments have equal types (but `where`'s condition). Folds constants that
    are plain.

    Raises ValueError for an unknown operation or a wrong number of arguments."""
    rule = SCALARS.get(op)
    if rule is None or rule.arity != len(args):
        raise ValueError(f"unknown scalar operation {op}/{len(args)}")
    if rule.result == "bool":
        result = bool_
    elif rule.result == "branch":
        result = args[1].dtype
    else:
        result = dtype if dtype is not None else args[0].dtype
    simple = _plain(op, args, result)
    return simple if simple is not None else make(op, args, result)


def _plain(op: str, args: tuple[Expr, ...], result: DType) -> Expr | None:
    """Identities that hold for every IEEE value, so they need no law."""
    if op in ("cast", "narrow") and args[0].dtype == result:
        return args[0]
    if op == "where":
        if args[0].op == "const":
            return args[1] if args[0].value else args[2]
        if args[1] is args[2]:
            return args[1]
    if op in ("and", "or") and result is bool_:
        for this, other in ((args[0], args[1]), (args[1], args[0])):
            if this.op == "const":
                return (other if this.value else this) if op == "and" else (this if this.value else other)
    if op == "not" and result is bool_ and args[0].op == "const":
        return const(not args[0].value, bool_)
    if op == "cast" and args[0].op == "const" and not isinstance(args[0].value, Fraction):
        value = args[0].value
        assert isinstance(value, (bool, int, float))
        if (
            result.is_float
            and (result.bytes >= 4)
            and (not isinstance(value, float) or args[0].dtype.bytes <= result.bytes)
        ):
            if isinstance(value, int) and abs(value) >= 1 << 24 and result is f32:
                return None
            return const(float(value), result)
        if (
            not result.is_float
            and result.kind is not Kind.BOOL
            and isinstance(value, int)
            and abs(value) < 128
        ):
            return const(value, result) if value >= 0 or result.kind is Kind.INT else None
    return None


def where(condition: Expr, yes: Expr, no: Expr) -> Expr:
    """`yes` where `condition` holds, else `no`; reads of the side not taken are not performed."""
    return call("where", condition, yes, no)


def both(first: Expr | None, second: Expr | None) -> Expr | None:
    """The conjunction of two optional conditions (None = true)."""
    if first is None or second is None:
        return first if second is None else second
    return first if first is second else call("and", first, second)


def cast(x: Expr, dtype: DType) -> Expr:
    """`x` converted to `dtype`, with torch's conversion rules."""
    return call("cast", x, dtype=dtype)


def narrow(x: Expr, dtype: DType) -> Expr:
    """`x` in the program's type `dtype`, where a declaration computed in a wider one."""
    return call("narrow", x, dtype=dtype)


def checked(x: Expr, condition: Expr) -> Expr:
    """`x`, after a test: where `condition` does not hold, evaluation raises, whether the element is used or not.
    Declarations use it where no read would fail; lowering adds it for reads."""
    return x if is_const(condition, True) else make("checked", (x, condition), x.dtype)


def implied(condition: Expr, *tiles: Expr) -> Expr:
    """`condition`, which the program implies where this stands: taking it for true changes no result. It says which
    parts of a loop matter; no kernel tests it.

    `tiles`, if given, are reads that say where it may hold: of a list of tiles with a // C as its index for the tile of
    the looped axis a (entry e of the list stands where e does), of the number of its entries that are visible whole and
    of those that are so at all, and perhaps of whether a value of the looped axis sees anything: those that do not are
    in every list."""
    return make("implied", (condition, *tiles), bool_)


def conjuncts(condition: Expr | None) -> tuple[Expr, ...]:
    """The terms of a conjunction, left to right."""
    if condition is None:
        return ()
    if condition.op == "and" and condition.dtype is bool_:
        return conjuncts(condition.args[0]) + conjuncts(condition.args[1])
    return (condition,)


def rebuild(e: Expr, args: tuple[Expr, ...]) -> Expr:
    """The node `e` over other arguments, simplified again; index arithmetic returns to its normal form."""
    if args == e.args:
        return e
    if e.op in ("read", "value"):
        return make(e.op, args, e.dtype, e.value)
    if e.op == "checked":
        return checked(*args)
    if e.op == "implied":
        return implied(*args)
    if e.dtype is i64 and e.op in _index_rebuild:
        return _index_rebuild[e.op](e.value is OF_PROGRAM, *args)
    return call(e.op, *args, dtype=e.dtype if SCALARS[e.op].result == "given" else None)


_index_rebuild: dict[str, Callable[..., Expr]] = {}


def register_index(op: str, build: Callable[..., Expr]) -> None:
    """Tell `rebuild` how to build index operation `op` in normal form (called by `ir.sizes.dims` once)."""
    _index_rebuild[op] = build


def transform(e: Expr, visit: Callable[[Expr], Expr | None], memo: dict[Expr, Expr] | None = None) -> Expr:
    """Replace nodes top down: `visit` returns a replacement (not visited again) or None to descend. Shared nodes once:
    those of several expressions, too, if they are given the same `memo`. Expressions may be of any depth."""
    memo = {} if memo is None else memo
    opened: set[Expr] = set()
    todo = [e]
    while todo:
        x = todo[-1]
        if x in memo:
            todo.pop()
            continue
        if x not in opened:
            found = visit(x)
            if found is not None or not x.args:
                memo[x] = x if found is None else found
                continue
            opened.add(x)
            missing = [a for a in reversed(x.args) if a not in memo]
            if missing:
                todo += missing
                continue
        memo[x] = rebuild(x, tuple([memo[a] for a in x.args]))
    return memo[e]


def substitute(e: Expr, mapping: Mapping[Expr, Expr], memo: dict[Expr, Expr] | None = None) -> Expr:
    """Replace each node that is a key of `mapping`, simultaneously. `memo` as in `transform`."""
    return e if mapping.keys().isdisjoint(walk(e)) else transform(e, mapping.get, memo)


def walk(e: Expr) -> tuple[Expr, ...]:
    """Every distinct node below and including `e`, arguments first."""
    return (*_below(e), e)


def _below(e: Expr) -> tuple[Expr, ...]:
    """The nodes of `walk` without `e` itself, which the memo must not keep alive."""
    if e.below_memo is None:
        todo = [e]
        while todo:
            x = todo[-1]
            missing = [a for a in x.args if a.below_memo is None]
            if missing:
                todo += missing
                continue
            todo.pop()
            if x.below_memo is None:
                found: dict[Expr, None] = {}
                for a in x.args:
                    found.update(dict.fromkeys(a.below_memo or ()))
                    found[a] = None
                x.below_memo = tuple(found)
    return e.below_memo or ()


def uncomputed(e: Expr, computed: Callable[[Expr], bool]) -> Iterator[Expr]:
    """Nodes below and including `e` that are not `computed`, arguments first; computed ones are not entered. The caller
    computes each before it asks for the next: what is remembered node by node costs each node once, at any depth."""
    todo = [e]
    while todo:
        x = todo[-1]
        missing = [] if computed(x) else [a for a in x.args if not computed(a)]
        if missing:
            todo += missing
            continue
        todo.pop()
        if not computed(x):
            yield x


def leaves(e: Expr, op: str) -> list[Expr]:
    """The distinct leaves (or reads) of kind `op` in `e`, in order of first use."""
    return [x for x in walk(e) if x.op == op]


@lru_cache(1 << 14)
def axes_of(e: Expr) -> frozenset[Expr]:
    """The axis leaves that `e` uses."""
    return frozenset(x for x in walk(e) if x.op == "axis")


@lru_cache(1 << 14)
def cost(e: Expr) -> int:
    """Vector instructions that one evaluation of `e` takes, counting shared nodes once (see `Scalar.cost`)."""
    return sum(SCALARS[x.op].cost for x in walk(e) if x.op in SCALARS and x.dtype is not i64)


def written(e: Expr) -> int:
    """Nodes of `e` written out, where a shared node stands as often as it is used."""
    for x in uncomputed(e, lambda x: x.written_memo > 0):
        x.written_memo = 1 + sum(a.written_memo for a in x.args)
    return e.written_memo


def longest_index(indices: Iterable[Expr]) -> int:
    """Nodes of the longest of some indices written out; 0 for those that data decide, which are computed by parts."""
    return max((written(i) for i in indices if all(x.op != "read" for x in walk(i))), default=0)


_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "lt": "<", "le": "<=",
"gt": ">",
          "ge": ">=", "eq": "==", "ne": "!=", "and": "&", "or": "|"}  # fmt: skip


def show(e: Expr) -> str:
    """`e` as text, for people and goldens."""
    texts: dict[Expr, str] = {}
    for x in walk(e):
        texts[x] = _shown(x, [texts[a] for a in x.args])
    return texts[e]


def _shown(e: Expr, inner: list[str]) -> str:
    if e.op == "const":
        return f"{e.value}"
    if isinstance(e.value, (Axis, Symbol)):
        return e.value.name
    if isinstance(e.value, Slot):
        return f"{e.value.side}{e.value.index}"
    if e.op == "read":
        return f"%{e.value}[{', '.join(inner)}]"
    if e.op == "var":
        return f"v{e.value}"
    if e.op == "value":
        return f"${e.value}[{', '.join(inner)}]"
    if e.op == "cast":
        return f"{e.dtype}({inner[0]})"
    if e.op in _INFIX:
        return f"({inner[0]} {_INFIX[e.op]} {inner[1]})"
    return f"{e.op}({', '.join(inner)})"


def is_const(e: Expr, value: float) -> bool:
    """Whether `e` is the constant `value` (NaN never)."""
    return (
        e.op == "const"
        and not isinstance(e.value, (Symbol, Axis, Slot))
        and e.value is not None
        and e.value == value
    )
