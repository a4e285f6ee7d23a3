"""Expressions as C++: one operator or one function of the vector header per scalar operation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction

import numpy as np

from tilewright.errors import UnsupportedError
from tilewright.ir.dtype import DType, Kind, bool_, i32, i64
from tilewright.ir.expr import SCALARS, Axis, Expr, Symbol, axes_of, transform, uncomputed, walk, written
from tilewright.ir.program import Var
from tilewright.ir.sizes import dims
from tilewright.lower.legalise.lanes import MIRRORED, compare_lanes
from tilewright.tuning.thresholds import CPP_TEXT

from .scope import Lines, RegisterPlace, Scope, Style, VectorUnit, bare, variables

INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^", "eq": "==", "ne": "!=",
         "lt": "<", "le": "<=", "gt": ">", "ge": ">="}  # fmt: skip
TRUTH = {"add": "({a} | {b})", "mul": "({a} & {b})", "maximum": "({a} | {b})", "minimum": "({a} & {b})",
         "eq": "({n}({a} ^ {b}))", "ne": "({a} ^ {b})", "lt": "(({n}{a}) & {b})", "le": "(({n}{a}) | {b})",
         "gt": "({a} & ({n}{b}))", "ge": "({a} | ({n}{b}))"}  # fmt: skip
FUNCTIONS = {
    "shl": "shift_left",
    "shr": "shift_right",
    "round": "round_even",
    "isnan": "is_nan",
    "isinf": "is_inf",
}
DIVISIONS = {"floordiv": ("div_floor", "floor_divide"), "mod": ("mod_floor", "remainder"),
             "truncdiv": ("div_trunc", "trunc_divide"), "fmod": ("mod_trunc", "fmod")}  # fmt: skip
BOUNDS = {"maximum": "at_least", "minimum": "at_most"}
NATURAL = {"floordiv": "div_natural", "mod": "mod_natural"}
INT32 = 1 << 31


def fits_int32(e: Expr) -> bool:
    """Whether index expression `e` is proved to lie in the range of a 32-bit integer."""
    low, high = dims.int_range(e)
    return low is not None and high is not None and -INT32 <= low and high < INT32


def function(e: Expr) -> str:
    """The function that computes operation `e`, for scalars and registers alike."""
    if e.op in DIVISIONS:
        return DIVISIONS[e.op][e.args[0].dtype.is_float]
    return FUNCTIONS.get(e.op, e.op)


def float_literal(value: float, single: bool) -> str:
    """The C++ literal of the nearest float (`single`) or double."""
    suffix = "f" if single else ""
    if math.isnan(value):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(value):
        return ("-" if value < 0 else "") + f"__builtin_inf{suffix}()"
    if not single:
        return repr(value)
    rounded = _single(value)
    if math.isinf(rounded):
        return float_literal(rounded, single)
    text = next(
        t
        for t in (f"{rounded:.{d}g}" for d in range(1, 18))
        if float(t) == value or _single(float(t)) == rounded
    )
    return (text if "." in text or "e" in text else text + ".0") + suffix


def _single(value: float) -> float:
    """The nearest single; infinite beyond the largest (Python's struct says so in its own byte order only)."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


class Expressions:
    """Prints expressions at the current `unit`; shared sub-expressions become locals of the current `scope`."""

    def __init__(self, style: Style, symbols: Mapping[str, str], lines: Lines) -> None:
        self.style = style
        self.symbols = symbols
        self.lines = lines
        self.places: dict[int, RegisterPlace] = {}
        self.states: set[int] = set()
        self.unit = VectorUnit({})
        self.scope = Scope()
        self.counts: Counter[Expr] = Counter()
        self._next = 0
        self.definitions: dict[Expr, Expr] = {}
        """Values that an expression defined for good, for questions about their range."""
        self._facts: dict[Expr, tuple[set[Axis], set[int]]] = {}
        self._depths: dict[Expr, int] = {}
        self._parts_first = True
        """Whether the shared parts of a deep expression are still to be printed."""
        self.reciprocals = False
        """Whether one number divides lanes through its reciprocal."""
        self.checked = True
        """Whether the sizes lie in the ranges of their symbols: the program's own checks of them have run."""

    # --- facts -----------------------------------------------------------

    def facts(self, e: Expr) -> tuple[set[Axis], set[int]]:
        """The axes and the values that `e` reads."""
        found = self._facts.get(e)
        if found is None:
            axes = {a.value for a in axes_of(e) if isinstance(a.value, Axis)}
            found = self._facts[e] = (axes, variables(e))
        return found

    def varies(self, e: Expr) -> bool:
        """Whether `e` differs between the lanes of this unit."""
        if self.unit.lane is None:
            return False
        axes, values = self.facts(e)
        return self.unit.lane in axes or any(self._spans_lane(v) for v in values)

    def data_varies(self, e: Expr) -> bool:
        """Whether `e` reads a value that differs between the lanes of this unit."""
        return self.unit.lane is not None and any(self._spans_lane(v) for v in self.facts(e)[1])

    def _spans_lane(self, value: int) -> bool:
        return any(a == self.unit.lane for a, _ in self.places[value].dims)

    def fits(self, e: Expr) -> bool:
        """Whether index expression `e` is proved to fit 32 bits, looking into the values that it reads."""
        return fits_int32(transform(e, self.definitions.get))

    # --- values ----------------------------------------------------------

    def access(self, value: int) -> str:
        """The register (or scalar) that holds this unit's part of a value."""
        place = self.places[value]
        if not place.array:
            return place.name
        return place.name + "".join(f"[{self.unit.index[a]}]" for a, _ in place.dims if a in self.unit.index)

    def fresh(self) -> str:
        """A new name for a local."""
        self._next += 1
        return f"t{self._next}"

    def scalar(self, e: Expr) -> str:
        """`e` as one value; the vector axis stands for its first value in this unit."""
        return self._shared(e, False)

    def vector(self, e: Expr) -> str:
        """`e` as one register of this unit; without a vector axis the same as `scalar`."""
        if self.unit.lane is None:
            return self.scalar(e)
        if not self.varies(e):
            return self.splat(e.dtype, bare(self.scalar(e)))
        return self._shared(e, True)

    def splat(self, dtype: DType, text: str) -> str:
        """A scalar text in every lane."""
        lanes = self.unit.lanes
        if dtype.kind is Kind.BOOL:
            return f"splat_mask<{lanes}>({text})"
        return f"splat<{self.style.scalar(dtype)}, {lanes}>({text})"

    def _shared(self, e: Expr, wide: bool) -> str:
        if not e.args:
            return self._leaf(e, wide)
        name = self._known(e, wide)
        if name is None:
            self._print_parts(e, wide)
            text = self._call_vector(e) if wide else self._call_scalar(e)
            if self.counts[e] < 2:
                return text
            name = self.fresh()
            kind = self.style.vector(e.dtype, self.unit.lanes) if wide else self.style.scalar(e.dtype)
            self.lines.put(f"const {kind} {name} = {bare(text)};")
            self.scope.names[e, wide] = name
        return name

    def _print_parts(self, e: Expr, wide: bool) -> None:
        """Gives the shared parts of a deep expression their names, the innermost first."""
        if (
            not self._parts_first
            or written(e) <= CPP_TEXT.max_levels_from_outside
            or self._depth(e) <= CPP_TEXT.max_levels_from_outside
        ):
            return
        self._parts_first = False
        for x in walk(e)[:-1]:
            if self.counts[x] > 1 and x.op in SCALARS:
                if not wide:
                    self.scalar(x)
                elif x.dtype is i64 and self._plain_index(x):
                    self.narrow_index(x)
                else:
                    self.vector(x)
        self._parts_first = True

    def _depth(self, e: Expr) -> int:
        for x in uncomputed(e, self._depths.__contains__):
            self._depths[x] = 1 + max((self._depths[a] for a in x.args), default=0)
        return self._depths[e]

    def _known(self, e: Expr, wide: bool | DType) -> str | None:
        axes, values = self.facts(e)
        scope: Scope | None = self.scope
        while scope is not None:
            if (e, wide) in scope.names:
                return scope.names[e, wide]
            if values & self.states or axes & scope.own:
                return None
            scope = scope.parent
        return None

    def _leaf(self, e: Expr, wide: bool) -> str:
        value = e.value
        if e.op == "var" and isinstance(value, int):
            return self.access(value)
        if isinstance(value, Symbol):
            return self.symbols[value.name]
        if isinstance(value, Axis):
            text = self.unit.values[value]
            return f"iota<i64, {self.unit.lanes}>({text})" if wide else text
        if e.op == "const":
            return self.literal(e)
        raise UnsupportedError(f"no C++ for a leaf {e.op}", phase="emit")

    def literal(self, e: Expr) -> str:
        """A constant."""
        value = e.value
        assert isinstance(value, (bool, int, float, Fraction))
        if e.dtype.kind is Kind.BOOL:
            return "true" if value else "false"
        if e.dtype.is_float and self.style.exact:
            return self._exact_literal(value)
        if e.dtype.is_float:
            text = float_literal(float(value), e.dtype.bytes < 8)
            return f"({text})" if text.startswith("-") else text
        if value == -(1 << 63):
            return "(-9223372036854775807 - 1)"
        text = f"{int(value)}" if value >= 0 else f"({int(value)})"
        return text if e.dtype.bytes >= 4 else f"{self.style.scalar(e.dtype)}({int(value)})"

    def _exact_literal(self, value: float | Fraction) -> str:
        if isinstance(value, float) and not math.isfinite(value):
            return f"exact_shadow({float_literal(value, False)})"
        if isinstance(value, float) and value == 0.0 and math.copysign(1, value) < 0:
            return "exact_words(-0.0, 0, 0, 0)"
        fraction = Fraction(value)
        top, bottom = fraction.numerator, fraction.denominator
        if max(abs(top), bottom) < 1 << 62:
            return f"exact_ratio({top}, {bottom})"
        residues = ", ".join(str(top * pow(bottom, -1, p) % p) for p in EXACT_PRIMES)
        return f"exact_words({float_literal(float(value), False)}, {residues})"

    # --- operations --------------------------------------------------------

    def _call_scalar(self, e: Expr) -> str:
        if e.op in ("cast", "narrow"):
            return self._scalar_cast(e)
        if e.dtype is i64 and e.op == "add":
            return self._sum(e)
        if e.dtype is i64 and e.op == "mul" and dims.static(e.args[1]) == -1:
            return f"(-{self.scalar(e.args[0])})"
        args = [self.scalar(a) for a in e.args]
        if e.dtype is i64 and e.op in ("floordiv", "mod"):
            return self._index_division(e, args)
        if e.op == "where":
            return f"({self._condition(e)} ? {args[1]} : {args[2]})"
        if e.dtype is i64 and e.op in ("truncdiv", "fmod", "pow", "shl", "shr"):
            args = [f"i64({bare(a)})" for a in args]  # a literal is an int, and these take one type
        text = self._operation(e, args, False)
        if e.dtype.bytes < 4 and e.dtype.kind in (Kind.INT, Kind.UINT):
            return f"{self.style.scalar(e.dtype)}({bare(text)})"  # C++ computes these in int
        return text

    def _condition(self, e: Expr) -> str:
        """What stands before the question mark. One that has a question mark itself keeps its parentheses: `a ? b : c ?
        d : e` is `a ? b : (c ? d : e)`."""
        text = self.scalar(e.args[0])
        return text if e.args[0].op == "where" else bare(text)

    def _sum(self, e: Expr) -> str:
        """An index sum as `a + b - c`."""
        plus: list[str] = []
        minus: list[str] = []
        stack = [e]
        while stack:
            x = stack.pop()
            if x.op == "add" and (x is e or (self.counts[x] < 2 and self._known(x, False) is None)):
                stack += [x.args[1], x.args[0]]
                continue
            factor = x.args[1] if x.op == "mul" else x
            number = factor.value if factor.op == "const" else 0
            if isinstance(number, int) and number < 0:
                size = dims.integer(-number)
                minus.append(str(-number) if x is factor else self.scalar(dims.mul(x.args[0], size)))
            else:
                plus.append(self.scalar(x))
        return f"({' - '.join([' + '.join(plus) or '0', *minus])})"

    def _index_division(self, e: Expr, args: list[str]) -> str:
        natural = self.checked and dims.at_least(e.args[0], 0) and dims.at_least(e.args[1], 1)
        name = NATURAL[e.op] if natural else function(e)
        return f"{name}({bare(args[0])}, {bare(args[1])})"

    def _scalar_cast(self, e: Expr) -> str:
        return self.converted(bare(self.scalar(e.args[0])), e.args[0].dtype, e.dtype)

    def converted(self, text: str, have: DType, want: DType, wide: bool = False) -> str:
        """A scalar (or, if `wide`, a register) of type `have` as one of type `want`."""
        if self.style.exact and (have.is_float or want.is_float):
            if have.is_float and want.is_float:
                return text
            return f"exact_from({text})" if want.is_float else f"exact_to<{self.style.scalar(want)}>({text})"
        return f"{'convert' if wide else 'to'}<{self.style.memory(want)}>({text})"

    def _call_vector(self, e: Expr) -> str:
        if e.op in MIRRORED and e.args[0].dtype is i64:
            return self._compare_lanes(e)
        if e.op in ("cast", "narrow"):
            of = e.args[0]
            text = self.narrow_index(of) if of.dtype is i64 and self._plain_index(of) else self.vector(of)
            return f"convert<{self.style.memory(e.dtype)}>({bare(text)})"
        if e.dtype is i64 and self._plain_index(e):
            return f"recast<i64>({bare(self.narrow_index(e))})"
        if e.op == "where" and not self.varies(e.args[0]):
            return f"({self._condition(e)} ? {self.vector(e.args[1])} : {self.vector(e.args[2])})"
        if self._divides_naturally(e):
            return f"{NATURAL[e.op]}({bare(self.vector(e.args[0]))}, {bare(self.scalar(e.args[1]))})"
        if self._through_reciprocal(e):
            return f"divided({bare(self.vector(e.args[0]))}, {bare(self.scalar(e.args[1]))})"
        args = [self.vector(a) for a in e.args]
        if e.op == "where":
            return f"select({', '.join(bare(a) for a in args)})"
        if e.op in BOUNDS and e.dtype.is_float and any(_is_number(a) for a in e.args):
            x, bound = args if _is_number(e.args[1]) else reversed(args)
            return f"{BOUNDS[e.op]}({bare(x)}, {bound})"
        return self._operation(e, args, True)

    def _operation(self, e: Expr, args: list[str], wide: bool) -> str:
        """`e` over texts of its arguments: registers (`wide`) or scalars."""
        source = e.args[0].dtype
        if source is bool_ and e.op in TRUTH:
            return TRUTH[e.op].format(a=args[0], b=args[1], n="~" if wide else "!")
        if e.op == "div" and not source.is_float:
            raise UnsupportedError(
                "true division of integers", phase="emit", hint="cast the operands to a float first"
            )
        if e.op in INFIX:
            return f"({args[0]} {INFIX[e.op]} {args[1]})"
        if e.op == "neg":
            return f"(-{args[0]})"
        if e.op == "not":
            return f"({'!' if source is bool_ and not wide else '~'}{args[0]})"
        return f"{function(e)}({', '.join(bare(a) for a in args)})"

    def _through_reciprocal(self, e: Expr) -> bool:
        if not self.reciprocals or self.style.exact or e.op != "div":
            return False
        return e.dtype.is_float and not self.varies(e.args[1])

    def _divides_naturally(self, e: Expr) -> bool:
        """Whether `e` divides lanes that are proved not negative by one positive number."""
        if e.dtype is not i64 or e.op not in NATURAL or self.varies(e.args[1]):
            return False
        return not self.facts(e)[1] and dims.at_least(e.args[0], 0) and dims.at_least(e.args[1], 1)

    # --- index vectors -------------------------------------------------------

    def _plain_index(self, e: Expr) -> bool:
        """Whether lanes of `e` may be computed in 32 bits: an index expression, all proved small."""
        return self.varies(e) and not self.data_varies(e) and fits_int32(e) and _stays_small(e)

    def narrow_index(self, e: Expr) -> str:
        """Lanes of the i64 expression `e`, which fits, as 32-bit integers."""
        lanes = self.unit.lanes
        if not self.varies(e):
            return f"splat<i32, {lanes}>({bare(self.scalar(e))})"
        if isinstance(e.value, Axis):
            return f"iota<i32, {lanes}>({self.unit.values[e.value]})"
        if not _stays_small(e):
            return f"recast<i32>({bare(self._shared(e, True))})"
        name = self._known(e, i32)
        if name is None:
            self._print_parts(e, True)
            text = self._narrow_call(e)
            if self.counts[e] < 2 or written(e) <= CPP_TEXT.max_repeated_index_nodes:
                return text
            name = self.fresh()
            self.lines.put(f"const {self.style.vector(i32, lanes)} {name} = {bare(text)};")
            self.scope.names[e, i32] = name
        return name

    def _narrow_call(self, e: Expr) -> str:
        if self._divides_naturally(e):
            text = f"({bare(self.narrow_index(e.args[0]))}, {bare(self.scalar(e.args[1]))})"
            return f"{NATURAL[e.op]}{text}"
        args = [self.narrow_index(a) for a in e.args]
        if e.op in INFIX:
            return f"({args[0]} {INFIX[e.op]} {args[1]})"
        return f"{function(e)}({bare(args[0])}, {bare(args[1])})"

    def lane_bound(self, e: Expr) -> tuple[str, str] | None:
        """A comparison of indices as ("below", n): it holds in the first n lanes; ("from", n): in all others; ("at", n)
        or ("not at", n): in that lane or all others. None if it is nothing of the kind."""
        found = None if self.unit.lane is None else compare_lanes(e, self.unit.lane)
        return None if found is None else (found[0], bare(self.scalar(found[1])))

    def _compare_lanes(self, e: Expr) -> str:
        bound = self.lane_bound(e)
        if bound is not None:
            return self.bound_mask(bound)
        if all(not self.data_varies(a) and fits_int32(a) for a in e.args):
            args = [self.narrow_index(a) for a in e.args]
        else:
            args = [self.vector(a) for a in e.args]
        return f"({args[0]} {INFIX[e.op]} {args[1]})"

    def bound_mask(self, bound: tuple[str, str]) -> str:
        """The mask of a `lane_bound`."""
        kind, n = bound
        lanes = self.unit.lanes
        if kind in ("below", "from"):
            text = f"first_lanes<{lanes}>({n})"
        else:
            text = f"only_lane<{lanes}>({n})"
        return f"(~{text})" if kind in ("from", "not at") else text


def _is_number(e: Expr) -> bool:
    return e.op == "const" and isinstance(e.value, (float, Fraction)) and e.value == e.value


def _stays_small(e: Expr) -> bool:
    """Whether index expression `e` can be done on 32-bit lanes: its operands fit, too."""
    return (not e.args and e.op != "var") or (
        e.op in ("add", "sub", "mul", "floordiv", "mod", "maximum", "minimum")
        and all(map(fits_int32, e.args))
    )


EXACT_PRIMES = (4503599627370353, 6 * 4503599627370353 + 1, 12 * (6 * 4503599627370353 + 1) + 1)


def typed(var: Var, style: Style, unit: VectorUnit) -> str:
    """The C++ type of one register (or scalar) of `var` in `unit`."""
    if unit.lane is not None and unit.lane in var.axes:
        return style.vector(var.dtype, unit.lanes)
    return style.scalar(var.dtype)
