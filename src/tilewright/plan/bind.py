"""How size symbols are found from the inputs of a call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from tilewright.errors import VerifyError
from tilewright.ir.expr import Expr, Symbol
from tilewright.ir.sizes import dims

from .data import Binding, Buffer, CallStep, Part, Plan, PlanSegment, Spec


def symbol_name(s: Expr) -> str:
    """The name of a symbol leaf."""
    assert isinstance(s.value, Symbol)
    return s.value.name


def names_in(exprs: Iterable[Expr]) -> Iterator[str]:
    """Names of the size symbols that `exprs` use, with repetitions."""
    for e in exprs:
        if e.op != "const":
            yield from _names(e)


@lru_cache(1 << 14)
def _names(e: Expr) -> tuple[str, ...]:
    """Each new size of a plan asks again for the names of all its buffers."""
    return tuple(symbol_name(s) for s in dims.symbols_of(e))


def _candidates(inputs: Sequence[Spec | Expr]) -> list[tuple[Expr, int, Part, int]]:
    """Every host integer that a call brings: scalars and sizes in calling order, then strides."""
    found: list[tuple[Expr, int, Part, int]] = []
    for k, given in enumerate(inputs):
        if isinstance(given, Spec):
            found += [(e, k, Part.SIZE, d) for d, e in enumerate(given.shape)]
        else:
            found.append((given, k, Part.SCALAR, 0))
    for k, given in enumerate(inputs):
        if isinstance(given, Spec):
            found += [(e, k, Part.STRIDE, d) for d, e in enumerate(given.strides)]
    return found


def bind_symbols(inputs: Sequence[Spec | Expr], *, scalars: bool = True) -> tuple[Binding, ...]:
    """One binding per symbol that the inputs determine: the first integer that is linear in it once the symbols bound
    before are known. Without `scalars`, host scalars are not looked at."""
    known: dict[str, Binding] = {}
    pending = [c for c in _candidates(inputs) if scalars or c[2] is not Part.SCALAR]
    while True:
        rest: list[tuple[Expr, int, Part, int]] = []
        progress = False
        for e, k, part, d in pending:
            unknown = [s for s in dims.symbols_of(e) if symbol_name(s) not in known]
            if not unknown:
                continue
            scale = dims.coefficient(e, unknown[0]) if len(unknown) == 1 else None
            if scale is None or scale is dims.ZERO:
                rest.append((e, k, part, d))
                continue
            shift = dims.sub(e, dims.mul(scale, unknown[0]))
            name = symbol_name(unknown[0])
            known[name] = Binding(name, k, part, d, scale, shift)
            progress = True
        if not progress or not rest:
            return tuple(known.values())
        pending = rest


def check_bound(plan: Plan) -> None:
    """Raise VerifyError unless every symbol that the plan uses is bound by an input or measured before its use."""
    known = {b.symbol for b in plan.bindings}
    for number, segment in enumerate(plan.segments):
        late = _results_of_the_measured_call(segment)
        used = [b for k, b in enumerate(plan.buffers) if b.segment == number and k not in late]
        _check(used, known)
        known |= {m.symbol for m in segment.measures}
        _check([plan.buffers[k] for k in sorted(late)], known)


def _check(buffers: Sequence[Buffer], known: set[str]) -> None:
    missing = {n for b in buffers for n in names_in((*b.spec.shape, *b.spec.strides, b.offset))} - known
    if missing:
        raise VerifyError(f"nothing determines the sizes {', '.join(sorted(missing))}", phase="plan")


def _results_of_the_measured_call(segment: PlanSegment) -> set[int]:
    """A segment that measures ends with the call whose results tell the sizes. All of them may have these sizes: one
    result tells a size, and the others have it too."""
    last = segment.steps[-1] if segment.measures and segment.steps else None
    return set(last.outputs) if isinstance(last, CallStep) else set()
