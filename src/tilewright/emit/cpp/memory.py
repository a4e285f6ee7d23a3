"""Loads, stores and masks as C++: which address form, which lanes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.errors import UnsupportedError
from tilewright.ir.expr import Expr, axes_of, conjuncts
from tilewright.ir.program import Buffer, Check, Load, Store
from tilewright.ir.sizes import dims

from .expr import Expressions
from .scope import Lines, bare


@dataclass(frozen=True, slots=True)
class Guard:
    """A mask taken apart; all hold: `when` (a scalar condition), lane < `below`, `lanes` (a register)."""

    when: str | None = None
    below: str | None = None
    lanes: str | None = None

    @property
    def per_lane(self) -> bool:
        """Whether lanes may differ."""
        return self.below is not None or self.lanes is not None


@dataclass(frozen=True, slots=True)
class Address:
    """The elements of one access: from `pointer` (text), `stride` elements apart (a number, or text if not known), or
    at the positions `index` (a register) counted from it."""

    pointer: str
    stride: int | str = 0
    index: str | None = None


class MemoryPrinter:
    """Prints memory accesses of the current unit."""

    def __init__(self, expressions: Expressions, buffers: Mapping[str, str]) -> None:
        self.expressions = expressions
        self.buffers = buffers
        self.streams: dict[Expr, None] = {}
        """Conditions of the streamed stores that have been printed."""

    @property
    def lines(self) -> Lines:
        """Where text goes."""
        return self.expressions.lines

    # --- masks -------------------------------------------------------------

    def guard(self, mask: Expr | None) -> Guard:
        """`mask` taken apart for the current unit."""
        e = self.expressions
        when: list[str] = []
        below: list[str] = []
        lanes: list[str] = []
        for term in conjuncts(mask):
            bound = e.lane_bound(term)
            if not e.varies(term):
                when.append(e.scalar(term))
            elif bound is not None and bound[0] == "below":
                below.append(bound[1])
            else:
                lanes.append(e.vector(term))
        count = below[0] if below else None
        for other in below[1:]:
            count = f"min({count}, {other})"
        return Guard(_all(when), count, _all(lanes))

    def lanes_of(self, guard: Guard) -> str | None:
        """The lanes that a guard lets through, as a mask register (without its scalar condition)."""
        if guard.below is None:
            return guard.lanes
        first = f"first_lanes<{self.expressions.unit.lanes}>({guard.below})"
        return first if guard.lanes is None else f"({first} & {guard.lanes})"

    def some_lane(self, guard: Guard) -> str | None:
        """The scalar condition that some lane passes."""
        terms = [t for t in (guard.when, guard.below and f"{_factor(guard.below)} > 0") if t]
        if guard.lanes is not None:
            terms.append(f"any({bare(guard.lanes)})")
        return " && ".join(_factor(t) if " " in t else t for t in terms) or None

    # --- addresses ---------------------------------------------------------

    def address(self, buffer: Buffer, offset: Expr) -> Address:
        """How the lanes of this unit reach `buffer[offset]`."""
        e = self.expressions
        base = self.buffers[buffer.name]
        lane = e.unit.lane
        if lane is None or not e.varies(offset):
            return Address(self._pointer(base, offset))
        leaf = next((x for x in axes_of(offset) if x.value == lane), None)
        step = dims.coefficient(offset, leaf) if leaf is not None and not e.data_varies(offset) else None
        if step is None:
            return self._gathered(buffer, offset)
        number = dims.static(step)
        stride = number if number is not None else bare(e.scalar(step))
        return Address(self._pointer(base, offset), stride)

    def _pointer(self, base: str, offset: Expr) -> str:
        text = bare(self.expressions.scalar(offset))
        return base if text == "0" else f"{base} + {_factor(text) if '?' in text else text}"

    def _gathered(self, buffer: Buffer, offset: Expr) -> Address:
        """Positions that are not affine in the lane: what all lanes share goes to the pointer, the rest into lanes, of
        32 bits where they are proved to fit (an offset lies inside its buffer)."""
        e = self.expressions
        form = dims.linear(offset)
        rest = dims.from_linear({m: c for m, c in form.items() if any(e.varies(a) for a in m)})
        if e.fits(rest):
            shared = dims.from_linear({m: c for m, c in form.items() if not any(e.varies(a) for a in m)})
            return Address(self._pointer(self.buffers[buffer.name], shared), index=bare(e.narrow_index(rest)))
        base, high = self.buffers[buffer.name], dims.int_range(buffer.size)[1]
        if high is not None and high < 1 << 31:
            return Address(base, index=f"recast<i32>({bare(e.vector(offset))})")
        return Address(base, index=e.vector(offset))

    def _indexed(self, address: Address) -> Address:
        """The same lanes by positions, for accesses that strides cannot express under a mask."""
        if address.index is not None:
            return address
        lanes = self.expressions.unit.lanes
        return Address(address.pointer, index=f"iota<i64, {lanes}>(0, {address.stride})")

    # --- loads -------------------------------------------------------------

    def load(self, s: Load) -> str:
        """The value of a load in this unit: a register, or a scalar if the unit has no vector axis or the value has
        not."""
        e = self.expressions
        if e.unit.lane is None or e.unit.lane not in s.var.axes:
            return self._load_scalar(s)
        guard = self.guard(s.mask)
        address = self.address(s.buffer, s.offset)
        memory, lanes = e.style.memory(s.buffer.dtype), e.unit.lanes
        same = s.buffer.dtype.compute is s.var.dtype.compute
        plain = s.other is None or (s.other.op == "const" and same)
        fill = f", {e.scalar(s.other)}" if s.other is not None and plain and not _zero(s.other) else ""
        if address.index is None and address.stride == 0:
            return self._load_uniform(s, guard, address)
        if s.ahead is not None:
            self.lines.put(f"__builtin_prefetch({self.address(s.buffer, s.ahead).pointer}, 0, 2);")
        text = self._load_lanes(f"<{memory}, {lanes}>", address, guard, fill)
        if not same:
            text = f"convert<{e.style.memory(s.var.dtype)}>({text})"
        mask = self.lanes_of(guard)
        if s.other is not None and mask is not None and not plain:
            text = f"select({bare(mask)}, {text}, {bare(e.vector(s.other))})"
        if guard.when is not None:
            text = f"({guard.when} ? {text} : {self._other(s)})"
        return text

    def _load_lanes(self, types: str, address: Address, guard: Guard, fill: str) -> str:
        pointer = address.pointer
        if address.index is None and address.stride == 1:
            if guard.lanes is not None:
                return f"load_masked{types}({pointer}, {bare(self.lanes_of(guard) or '')}{fill})"
            return (
                f"load_part{types}({pointer}, {guard.below}{fill})"
                if guard.below
                else f"load{types}({pointer})"
            )
        if address.index is None and guard.lanes is None:
            if guard.below is None and address.stride == -1 and not types.startswith("<bool"):
                return f"reverse(load{types}({pointer} - {int(self.expressions.unit.lanes) - 1}))"
            if guard.below is None:
                return f"load_strided{types}({pointer}, {address.stride})"
            return f"load_strided_part{types}({pointer}, {address.stride}, {guard.below}{fill})"
        mask = self.lanes_of(guard) or f"splat_mask<{self.expressions.unit.lanes}>(true)"
        return f"take{types}({pointer}, {self._indexed(address).index}, {bare(mask)}{fill})"

    def _load_uniform(self, s: Load, guard: Guard, address: Address) -> str:
        """One element for all lanes, read only if some lane wants it."""
        e = self.expressions
        text = e.splat(s.var.dtype, self._element(s, address))
        some = self.some_lane(guard)
        if some is None:
            return text
        if guard.per_lane and s.other is not None:
            text = f"select({bare(self.lanes_of(guard) or '')}, {text}, {bare(e.vector(s.other))})"
        return f"({some} ? {text} : {self._other(s)})"

    def _load_scalar(self, s: Load) -> str:
        guard = self.guard(s.mask)
        text = self._element(s, self.address(s.buffer, s.offset))
        return text if guard.when is None else f"({guard.when} ? {text} : {self._other(s)})"

    def _element(self, s: Load, address: Address) -> str:
        text = f"at({address.pointer})"
        if s.buffer.dtype.compute is s.var.dtype.compute:
            return text
        return self.expressions.converted(text, s.buffer.dtype, s.var.dtype)

    def _other(self, s: Load) -> str:
        e = self.expressions
        wide = e.unit.lane is not None and e.unit.lane in s.var.axes
        if s.other is not None:
            return bare(e.vector(s.other) if wide else e.scalar(s.other))
        zero = (
            "exact_ratio(0, 1)"
            if e.style.exact and s.var.dtype.is_float
            else f"{e.style.scalar(s.var.dtype)}(0)"
        )
        return e.splat(s.var.dtype, zero) if wide else zero

    # --- stores and checks ---------------------------------------------------

    def store(self, s: Store, value: str | None = None) -> None:
        """Print a store of this unit; `value` is a register that holds `s.value` already."""
        e = self.expressions
        guard = self.guard(s.mask)
        wide = e.unit.lane is not None and e.unit.lane in s.axes
        address = self.address(s.buffer, s.offset)
        if wide and value is None and not e.varies(s.offset) and not e.varies(s.value):
            wide = False  # all lanes write the same to one place
            guard = Guard(self.some_lane(guard))
        if value is None:
            stored = s.unrounded
            value = bare(e.vector(stored) if wide else e.scalar(stored))
        if s.value.dtype.compute is not s.buffer.dtype.compute:
            value = e.converted(value, s.value.dtype, s.buffer.dtype, wide)
        if not wide:
            self._if(guard.when, f"put({address.pointer}, {value});")
        else:
            self._if(guard.when, self._store_lanes(address, guard, value, s))

    def _store_lanes(self, address: Address, guard: Guard, value: str, s: Store) -> str:
        pointer = address.pointer
        if address.index is None and address.stride == 0:
            raise UnsupportedError("a store of all lanes to one place", phase="emit")
        if address.index is None and address.stride == 1:
            if guard.lanes is not None:
                return f"store_masked({pointer}, {value}, {bare(self.lanes_of(guard) or '')});"
            if guard.below is not None:
                return f"store_part({pointer}, {value}, {guard.below});"
            if s.stream is None:
                return f"store({pointer}, {value});"
            self.streams[s.stream] = None
            past = "" if s.stream.op == "const" else f", {bare(self.expressions.scalar(s.stream))}"
            return f"store_stream({pointer}, {value}{past});"
        if address.index is None and guard.lanes is None:
            if guard.below is None:
                return f"store_strided({pointer}, {address.stride}, {value});"
            return f"store_strided_part({pointer}, {address.stride}, {value}, {guard.below});"
        mask = self.lanes_of(guard) or f"splat_mask<{self.expressions.unit.lanes}>(true)"
        return f"scatter({pointer}, {self._indexed(address).index}, {bare(mask)}, {value});"

    def _if(self, condition: str | None, statement: str) -> None:
        self.lines.put(statement if condition is None else f"if ({bare(condition)}) {statement}")

    def check(self, s: Check) -> None:
        """Print a check of this unit."""
        e = self.expressions
        guard = self.guard(s.mask)
        if not e.varies(s.condition) and not guard.per_lane:
            failed = f"!{_factor(e.scalar(s.condition))}"
        else:
            mask = self.lanes_of(guard)
            wrong = f"(~{_factor(e.vector(s.condition))})"
            failed = f"any({wrong if mask is None else f'{bare(mask)} & {wrong}'})"
        self._if(f"{guard.when} && {failed}" if guard.when else failed, f"fail(context, {s.code});")


def _zero(e: Expr) -> bool:
    """Whether `e` is the constant whose bits are all zero."""
    return e.op == "const" and str(e.value) in ("0", "0.0", "False")


def _factor(text: str) -> str:
    return text if bare(text) != text or text.replace("_", "").isalnum() else f"({text})"


def _all(terms: list[str]) -> str | None:
    if not terms:
        return None
    return terms[0] if len(terms) == 1 else "(" + " & ".join(terms) + ")"
