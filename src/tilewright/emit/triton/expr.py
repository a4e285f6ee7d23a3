"""Expressions as Triton text: one operator or one function per scalar operation; block axes meet by name."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from tilewright.errors import UnsupportedError
from tilewright.ir.dtype import DType, Kind, bool_, f32, i32, i64
from tilewright.ir.expr import Axis, Expr, Slot, Symbol, axes_of, substitute
from tilewright.ir.program import Var, value_of
from tilewright.ir.sizes import dims
from tilewright.lower.variants import COMPARISONS, RING, is_index, natural

from .angles import ANGLES_OF_SINGLES
from .helpers import HELPERS, Helpers
from .index import Indices
from .scope import AND, ATOM, COMPARE, OR, PRODUCT, SUM, UNARY, XOR, Lines, Scope, Term, named_type, type_of

INFIX = {"add": ("+", SUM), "sub": ("-", SUM), "mul": ("*", PRODUCT), "div": ("/", PRODUCT), "and": ("&", AND),
         "or": ("|", OR), "xor": ("^", XOR), "eq": ("==", COMPARE), "ne": ("!=", COMPARE), "lt": ("<", COMPARE),
         "le": ("<=", COMPARE), "gt": (">", COMPARE), "ge": (">=", COMPARE)}  # fmt: skip
TRUTH = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and"}
"""Arithmetic of truth values -> the logical operation that it is."""
ORDER = {"lt": ("and", 0), "le": ("or", 0), "gt": ("and", 1), "ge": ("or", 1)}
"""Comparison of truth values -> the logical operation that it is once the argument of this number is inverted."""
OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}
LANGUAGE = {"abs": "tl.abs", "floor": "tl.floor", "ceil": "tl.ceil", "exp": "tl.exp", "exp2": "tl.exp2",
            "log": "tl.log", "log2": "tl.log2", "sin": "tl.sin", "cos": "tl.cos", "erf": "tl.erf",
            "rsqrt": "tl.rsqrt", "sigmoid": "tl.sigmoid", "fma": "tl.fma"}  # fmt: skip
LIBRARY = {"trunc": "trunc", "round": "nearbyint", **{name: name for name in (
    "expm1", "log10", "log1p", "tanh", "erfc", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh",
    "atan2", "fmod", "pow")}}  # fmt: skip
"""Operations on floats that come from the library of device functions, with their names there."""
INTEGERS = {"floordiv": "floor_div", "mod": "floor_mod", "truncdiv": "trunc_div", "fmod": "trunc_mod", "pow": "power",
            "shl": "shift_left", "shr": "shift_right"}  # fmt: skip
FLOATS = {"floordiv": "floor_divide", "mod": "remainder"}
STEPS = frozenset({"floor", "ceil", "trunc", "round"})
"""Functions that make a small error of their argument a large one, and leave an integer as it is."""
NATURAL = {"floordiv": "//", "mod": "%"}
"""Divisions of indices that are not negative."""
EXTREMA = ("maximum", "minimum")
WEAK = (f32, i32, i64)
"""Types that a function gives its result when one argument is a bare number."""


def number(value: float, single: bool) -> str:
    """The Python literal of the nearest float (`single`) or double."""
    if math.isnan(value) or math.isinf(value):
        return f'float("{value}")'
    if not single:
        return repr(value)
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    if not np.isfinite(rounded):
        return f'float("{rounded}")'
    # The shortest text of the largest single is beyond it as a double, which the language would take it for.
    largest = abs(rounded) == np.finfo(np.float32).max
    return repr(float(rounded)) if largest else str(rounded)


def count_reads(roots: Iterable[Expr]) -> Counter[Expr]:
    """How often each node is read by another one or as a root."""
    counts: Counter[Expr] = Counter()
    seen: set[Expr] = set()
    stack = list(roots)
    counts.update(stack)
    while stack:
        x = stack.pop()
        if x not in seen:
            seen.add(x)
            counts.update(x.args)
            stack += x.args
    return counts


class Expressions:
    """Prints expressions where some axes are bound; what is read more than once becomes a local of the scope.

    `tiles` gives the block axes with their tiles, in the order in which they become dimensions."""

    def __init__(
        self,
        wide: bool,
        symbols: Mapping[str, str],
        tiles: Mapping[Axis, int],
        lines: Lines,
        helpers: Helpers,
        indices: Indices,
    ) -> None:
        self.index_type = i64 if wide else i32
        self.symbols, self.tiles, self.lines, self.helpers = symbols, dict(tiles), lines, helpers
        self.indices = indices
        self.position = {a: k for k, a in enumerate(tiles)}
        self.axes: dict[Axis, Term] = {}
        self.values: dict[int, Term] = {}
        self.states: set[int] = set()
        self.counts: Counter[Expr] = Counter()
        self.scope = Scope()
        self._named = 0

    # --- dimensions --------------------------------------------------------

    def union(self, terms: Iterable[Term]) -> tuple[Axis, ...]:
        """The block axes of some terms together."""
        return self.ordered(a for t in terms for a in t.dims)

    def ordered(self, axes: Iterable[Axis]) -> tuple[Axis, ...]:
        """Block axes in the order of dimensions."""
        return tuple(sorted({a for a in axes if a in self.position}, key=self.position.__getitem__))

    def divide(self, whole: Axis, part: Axis, tile: int) -> None:
        """Let `part`, of blocks of `tile`, be an axis in the place of another one."""
        self.tiles[part], self.position[part] = tile, self.position[whole]

    def append(self, a: Axis, tile: int) -> None:
        """Let `a`, of blocks of `tile`, be an axis behind all others."""
        self.tiles[a], self.position[a] = tile, len(self.position)

    def fit(self, term: Term, wanted: tuple[Axis, ...]) -> Term:
        """`term` with a dimension for each axis of `wanted`, of size 1 where it has none. A scalar stays one."""
        if not term.dims or term.dims == wanted:
            return term
        index = ", ".join(":" if a in term.dims else "None" for a in wanted)
        return Term(f"{self.unaligned(term).at(ATOM)}[{index}]", ATOM, wanted)

    @staticmethod
    def unaligned(term: Term) -> Term:
        """`term`, said to be aligned to nothing if it is a mixed sum: as part of something else it would make that
        look more aligned than it is."""
        if not term.mixed:
            return term
        return Term(f"tl.multiple_of({term.text}, {[1] * len(term.dims)})", ATOM, term.dims)

    def scalar(self, number: str, type_: str) -> Term:
        """A number as a value of a type, without dimensions."""
        return Term(f"tl.full((), {number}, {type_})")

    def shape(self, axes: Sequence[Axis]) -> str:
        """The shape of a block over `axes`."""
        return "[" + ", ".join(str(self.tiles[a]) for a in axes) + "]"

    def spread(self, term: Term, wanted: tuple[Axis, ...], dtype: DType) -> Term:
        """`term` as a block that has all of `wanted`; a number becomes a value of `dtype`."""
        if term.number and not wanted:
            return self.scalar(term.text, type_of(dtype))
        if term.number:
            return Term(f"tl.full({self.shape(wanted)}, {term.text}, {type_of(dtype)})", ATOM, wanted)
        if term.dims == wanted:
            return term
        return Term(f"tl.broadcast_to({self.fit(term, wanted).text}, {self.shape(wanted)})", ATOM, wanted)

    # --- kinds of use --------------------------------------------------------

    def term(self, e: Expr) -> Term:
        """`e` in the type that suits it: an index expression in the width of indices, anything else in its own."""
        return self._shared(e, False)

    def data(self, e: Expr) -> Term:
        """`e` in its own type; a constant is a bare number."""
        found = self.term(e)
        if found.number or self.index_type is i64 or not self.indices.holds(e):
            return found
        return self.cast_text(found, i64)

    def value(self, e: Expr) -> Term:
        """`e` in its own type, also if it is a constant."""
        found = self.data(e)
        return self.spread(found, (), e.dtype) if found.number else found

    def offset(self, e: Expr) -> Term:
        """`e`, whose value is known to fit, in the width of indices."""
        return self.term(e) if self.index_type is i64 or self.indices.holds(e) else self._shared(e, True)

    def held(self, var: Var, e: Expr) -> Term:
        """`e` in the type in which `var` is held."""
        if not self.indices.holds(value_of(var)):
            return self.value(e)
        found = self.term(e)
        return self.spread(found, (), self.index_type) if found.number else found

    def type_held(self, var: Var) -> DType:
        """The type in which `var` is held."""
        return self.index_type if self.indices.holds(value_of(var)) else var.dtype

    # --- sharing ---------------------------------------------------------------

    def _shared(self, e: Expr, as_offset: bool) -> Term:
        if not e.args and not as_offset:
            return self._leaf(e)
        key = (e, as_offset)
        known = self.scope.find(key, self.states)
        if known is not None:
            return known
        made = self._narrowed(e) if as_offset else self._made(e)
        if self.counts[e] < 2 or not e.args or made.text.isidentifier():
            return made
        letter = "m" if e.dtype is bool_ else "i" if is_index(e) or as_offset else "t"
        name = self.scope.names[key] = self.named(made, letter)
        return name

    def named(self, term: Term, letter: str) -> Term:
        """Print a local for `term`."""
        self._named += 1
        name = f"{letter}{self._named}"
        self.lines.put(f"{name} = {term.text}")
        return Term(name, ATOM, term.dims, mixed=term.mixed)

    def _narrowed(self, e: Expr) -> Term:
        """An index that depends on data, in 32 bits: only its low bits matter in sums and products."""
        if e.op in RING and e.op != "neg":
            return (
                self._sum(e, True) if e.op == "add" else self._infix(e.op, [self.offset(a) for a in e.args])
            )
        if e.op == "cast" and e.args[0].dtype is i32:
            return self.value(e.args[0])
        if e.op == "cast" and e.args[0].dtype is bool_:
            return self.cast_text(self.value(e.args[0]), i32)
        return self.cast_text(self.value(e), i32)

    def _leaf(self, e: Expr) -> Term:
        value = e.value
        if isinstance(value, Symbol):
            return Term(self.symbols[value.name])
        if isinstance(value, Axis):
            return self.axes[value]
        if isinstance(value, Slot):
            return Term(f"{value.side}{value.index}")
        if e.op == "var" and isinstance(value, int):
            return self.values[value]
        if e.op != "const":
            raise UnsupportedError(f"no Triton for a leaf {e.op}", phase="emit")
        return self._number(e)

    def _number(self, e: Expr) -> Term:
        value = e.value
        assert isinstance(value, (bool, int, float, Fraction))
        if e.dtype.kind is Kind.BOOL:
            return self.scalar(str(bool(value)), "tl.int1")
        text = number(float(value), e.dtype.compute is f32) if e.dtype.is_float else str(int(value))
        return Term(text, UNARY if text.startswith("-") else ATOM, (), True)

    # --- operations --------------------------------------------------------------

    def _made(self, e: Expr) -> Term:
        if e.op in ("cast", "narrow"):
            of = e.args[0]
            plain = self.indices.holds(of)
            if of.op == "div" and not e.dtype.is_float and e.dtype is not bool_:
                return self.converted(self._exact_quotient(of), of.dtype, e.dtype)
            return self.converted(self.term(of) if plain else self.value(of), of.dtype, e.dtype)
        if e.op == "add" and e.dtype is i64:
            return self._sum(e, False)
        if e.op == "not":
            return self._inverse(e.args[0])
        of = e.args[0]
        if e.op in STEPS and of.op == "div" and of.dtype.is_float:
            return self._operation(e, [self._exact_quotient(of)])
        args = self._arguments(e)
        if e.op == "mul" and is_index(e) and axes_of(e.args[1]) and not axes_of(e.args[0]):
            args.reverse()  # a place times a size reads better
        return self._operation(e, args)

    def _exact_quotient(self, e: Expr) -> Term:
        """Division of floats, correctly rounded (the operator may be off by a little)."""
        return self.call(self.helpers.use("divide"), [self.value(a) for a in e.args])

    def _arguments(self, e: Expr) -> list[Term]:
        """The arguments of `e` in one type; at least one of them is more than a bare number."""
        plain = self.indices.holds(e) or (e.op in COMPARISONS and all(map(self.indices.holds, e.args)))
        terms = [self.term(a) if plain else self.data(a) for a in e.args]
        first = 1 if e.op == "where" else 0
        typed = not (
            e.op in INFIX
            or e.op == "where"
            or (e.op in EXTREMA and e.dtype.compute in WEAK)
            or _plain_division(e)
        )
        for k in range(first, len(terms)):
            if terms[k].number and (typed or all(t.number for t in terms[first:])):
                terms[k] = self.spread(terms[k], (), self.index_type if plain else e.args[k].dtype)
        return terms

    def _operation(self, e: Expr, args: list[Term]) -> Term:
        of = e.args[0].dtype
        if e.op == "where":
            return self.call("tl.where", args)
        if of is bool_:
            return self._truth(e.op, args)
        if e.op == "div" and not of.is_float:
            raise UnsupportedError(
                "true division of integers", phase="emit", hint="cast the operands to a float first"
            )
        if e.op in INFIX:
            return self._infix(e.op, args)
        if e.op in EXTREMA:
            return self._extremum(e, args)
        if _plain_division(e):
            return self.infix(NATURAL[e.op], PRODUCT, args)
        return self._float_call(e, args) if of.is_float else self._integer_call(e, args)

    def _float_call(self, e: Expr, args: list[Term]) -> Term:
        single = e.args[0].dtype.compute is f32
        if e.op in LANGUAGE:
            return self.call(LANGUAGE[e.op], args)
        if single and e.op in ANGLES_OF_SINGLES:
            return self.call(self.helpers.use(ANGLES_OF_SINGLES[e.op]), args)
        if e.op in LIBRARY:
            self.helpers.libdevice = True
            return self.call(f"libdevice.{LIBRARY[e.op]}", args)
        if e.op in FLOATS:
            return self.call(self.helpers.use(FLOATS[e.op]), args)
        if e.op in HELPERS:
            return self.call(self.helpers.use(e.op), args)
        match e.op:
            case "neg":  # Triton's own is 0 - x, which makes 0 of 0
                return self.infix("*", PRODUCT, [Term("-1.0", number=True), *args])
            case "sqrt":
                return self.call("tl.sqrt_rn" if single else "tl.sqrt", args)
            case "reciprocal":
                return self.infix("/", PRODUCT, [Term("1.0", number=True), *args])
            case "close_div":
                return self.call(self.helpers.use("divide"), args)
            case "truncdiv":
                self.helpers.libdevice = True
                return self.call("libdevice.trunc", [self.call(self.helpers.use("divide"), args)])
            case "isnan":
                return self.call(self.helpers.use("is_nan"), args)
            case "isinf":
                return self.infix(
                    "==", COMPARE, [self.call("tl.abs", args), Term('float("inf")', number=True)]
                )
            case "sign":
                return self.call(self.helpers.use("sign"), args)
            case _:
                raise _no(e)

    def _integer_call(self, e: Expr, args: list[Term]) -> Term:
        if e.op in INTEGERS:
            name = INTEGERS[e.op]
            if e.op == "shr" and e.dtype.kind is Kind.UINT:
                name = "shift_right_unsigned"
            return self.call(self.helpers.use(name), args)
        if e.op in STEPS:
            return args[0]
        match e.op:
            case "neg":
                return Term(f"-{args[0].at(UNARY)}", UNARY, args[0].dims)
            case "abs":
                return self.call("tl.abs", args)
            case "sign":
                return self.call(self.helpers.use("sign"), args)
            case _:
                raise _no(e)

    def _extremum(self, e: Expr, args: list[Term]) -> Term:
        if e.dtype.is_float:
            return self.call(self.helpers.use("larger" if e.op == "maximum" else "smaller"), args)
        return self.call(f"tl.{e.op}", args)

    def _truth(self, op: str, args: list[Term]) -> Term:
        if op in ORDER:
            op, k = ORDER[op]
            args[k] = Term(f"~{args[k].at(UNARY)}", UNARY, args[k].dims)
        name = TRUTH.get(op, op)
        if name not in INFIX:
            raise UnsupportedError(f"operation {op} on truth values", phase="emit")
        return self._infix(name, args)

    def _inverse(self, e: Expr) -> Term:
        if e.op in OPPOSITE and not e.args[0].dtype.is_float and e.args[0].dtype is not bool_:
            sign, level = INFIX[OPPOSITE[e.op]]
            return self.infix(sign, level, self._arguments(e))
        of = self.value(e)
        return Term(f"~{of.at(UNARY)}", UNARY, of.dims)

    def _infix(self, op: str, args: Sequence[Term]) -> Term:
        sign, level = INFIX[op]
        return self.infix(sign, level, args)

    def infix(self, sign: str, level: int, args: Sequence[Term]) -> Term:
        """Two terms with an operator between them."""
        wanted = self.union(args)
        a, b = (self.fit(t if level == SUM else self.unaligned(t), wanted) for t in args)
        left = a.at(level + 1 if level == COMPARE else level)
        return Term(f"{left} {sign} {b.at(level + 1)}", level, wanted, a.number and b.number)

    def call(self, name: str, args: Sequence[Term]) -> Term:
        """A call of an elementwise function."""
        wanted = self.union(args)
        return Term(
            f"{name}({', '.join(self.fit(self.unaligned(t), wanted).text for t in args)})", ATOM, wanted
        )

    def _sum(self, e: Expr, as_offset: bool) -> Term:
        """A sum of integers: scalars first, then ever larger blocks; what is subtracted last of its kind."""
        e, parts = self._products(e) if is_index(e) else (e, [])
        stack = [e]
        while stack:
            x = stack.pop()
            inner = x.op == "add" and x.dtype is i64
            if inner and (
                x is e or (self.counts[x] < 2 and self.scope.find((x, as_offset), self.states) is None)
            ):
                stack += [x.args[1], x.args[0]]
                continue
            use = self.offset if as_offset else self.term if is_index(e) else self.data
            parts.append(self._signed(x, use))
        return self._total(parts)

    def _products(self, e: Expr) -> tuple[Expr, list[tuple[bool, Term]]]:
        """Axes that are multiplied by a sum, as terms of a sum: what is left of `e`, and each such axis with its
        factor. As several terms over one axis they would be a mixed sum."""
        found: list[tuple[bool, Term]] = []
        for a in sorted((x for x in axes_of(e) if x.value in self.position), key=repr):
            factor = dims.coefficient(e, a)
            if factor is not None and len(dims.linear(factor)) > 1 and not axes_of(factor):
                found.append((False, self.infix("*", PRODUCT, [self._leaf(a), self.term(factor)])))
                e = substitute(e, {a: dims.ZERO})
        return e, found

    def _total(self, parts: list[tuple[bool, Term]]) -> Term:
        """The sum of (subtracted?, term): terms with equal axes first."""
        wanted = self.union(p for _, p in parts)
        parts.sort(key=lambda p: (len(p[1].dims), [self.position[a] for a in p[1].dims], p[0]))
        groups: list[tuple[bool, Term]] = []
        for negative, part in parts:
            before = groups[-1][1] if groups else None
            if before is None or (before.dims and before.dims != part.dims):
                groups.append((negative, part))
                continue
            groups[-1] = (False, self._plus(*groups[-1], negative, part))
        total = groups[0]
        for group in groups[1:]:
            fitted = (group[0], self.fit(group[1], wanted))
            total = (False, self._plus(total[0], self.fit(total[1], wanted), *fitted))
        return self._negated(total[1]) if total[0] else total[1]

    def _plus(self, first: bool, a: Term, second: bool, b: Term) -> Term:
        total = self.infix("-" if second else "+", SUM, [self._negated(a) if first else a, b])
        return replace(total, mixed=a.mixed or b.mixed or bool(set(a.dims) & set(b.dims)))

    @staticmethod
    def _negated(term: Term) -> Term:
        return Term(f"-{term.at(PRODUCT)}", UNARY, term.dims, term.number, term.mixed)

    def _signed(self, x: Expr, use: Callable[[Expr], Term]) -> tuple[bool, Term]:
        """One term of a sum: whether it is subtracted, and its size."""
        factor = x.args[1] if x.op == "mul" else x
        value = factor.value if factor.op == "const" else 0
        if not isinstance(value, int) or value >= 0:
            return False, use(x)
        size = dims.integer(-value)
        if x is factor:
            return True, use(size)
        other = use(x.args[0])
        return True, other if value == -1 else self.infix("*", PRODUCT, [other, use(size)])

    # --- conversions ---------------------------------------------------------------

    def cast_text(self, term: Term, want: DType) -> Term:
        """A conversion of a term as the language does it."""
        if term.dims:
            return Term(f"{term.at(ATOM)}.to({named_type(want)})", ATOM, term.dims, mixed=term.mixed)
        return Term(f"tl.cast({term.text}, {named_type(want)})", ATOM)

    def converted(self, term: Term, have: DType, want: DType) -> Term:
        """A value of type `have` as one of type `want` (a half is rounded, and stays in single precision)."""
        if want is bool_:
            return self.infix("!=", COMPARE, [term, Term("0.0" if have.is_float else "0", number=True)])
        if want.is_half:
            single = term if have.compute is f32 else self.cast_text(term, f32)
            return self.cast_text(self.cast_text(single, want), f32)
        if have.is_float and not want.is_float and want.bytes < 4:
            return self.cast_text(self.cast_text(term, i32), want)
        return term if have.compute is want.compute else self.cast_text(term, want)


def _plain_division(e: Expr) -> bool:
    """Whether `e` divides an index proved not negative by one proved positive."""
    return e.op in NATURAL and is_index(e) and natural(e.args[0]) and dims.at_least(e.args[1], 1)


def _no(e: Expr) -> UnsupportedError:
    return UnsupportedError(f"operation {e.op} on {e.args[0].dtype} in a Triton kernel", phase="emit")
