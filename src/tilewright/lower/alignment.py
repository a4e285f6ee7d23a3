"""Whether code that relies on aligned pointers is worth having beside the code that does not."""

from __future__ import annotations

from tilewright.ir.expr import axes_of
from tilewright.ir.program import Load, Store, TileProgram
from tilewright.ir.sizes import dims

from .variants import usual_statements


def alignment_pays(program: TileProgram) -> bool:
    """Not where the rows of every matrix are known to begin at odd places while vectors beside them (weights, a bias)
    begin at even ones. For wide accesses to the vectors, Triton would give each thread neighbours, between which
    accesses to the rows, element by element, leave gaps."""
    vectors, odd = False, False
    for s in usual_statements(program.body):
        if isinstance(s, (Load, Store)):
            steps = [dims.coefficient(s.offset, a) for a in axes_of(s.offset)]
            rest = [step for step in steps if step is not dims.ONE]
            if len(rest) == len(steps):
                continue
            if any(step is None or dims.divisible(step, 2) or dims.static(step) is None for step in rest):
                return True
            vectors |= not rest and isinstance(s, Load)
            odd |= bool(rest)
    return not (vectors and odd)
