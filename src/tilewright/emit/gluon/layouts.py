"""How blocks lie in the registers of a warp group: as a product leaves scores, as one leaves results, or along one axis
of either. Rows lie the same way in both, so that going from one to the other moves nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilewright.emit.triton.expr import Expressions
from tilewright.emit.triton.helpers import Helpers
from tilewright.emit.triton.index import Indices
from tilewright.emit.triton.scope import ATOM, Lines, Term, type_of
from tilewright.errors import UnsupportedError
from tilewright.ir.dtype import DType
from tilewright.ir.expr import Axis, Expr
from tilewright.lower.specialise.plan import WARPS_PER_STRIP, WarpPlan

OPERAND_COLUMNS = 16
"""Elements of fp16 or bf16 that a matrix unit sums over at once, and rows of a warp."""


def layout_lines(plan: WarpPlan) -> list[str]:
    """The constants of a file that name its layouts."""
    scores, results = (_product_layout(plan.tile[a]) for a in (plan.keys, plan.columns))
    known = {
        "SCORES": scores,
        "RESULTS": results,
        "WEIGHTS": "gl.DotOperandLayout(0, RESULTS.value, 2)",
        "ROWS": "gl.SliceLayout(1, SCORES.value)",
        "RESULT_ROWS": "gl.SliceLayout(1, RESULTS.value)",
        "KEYS": "gl.SliceLayout(0, SCORES.value)",
        "COLUMNS": "gl.SliceLayout(0, RESULTS.value)",
    }
    return [f"{name}: gl.constexpr = gl.constexpr({text})" for name, text in known.items()]


def _product_layout(columns: int) -> str:
    shape = [OPERAND_COLUMNS, columns, OPERAND_COLUMNS]
    return f"gl.NVMMADistributedLayout([3, 0], [{WARPS_PER_STRIP}, 1], {shape})"


class LaidExpressions(Expressions):
    """Prints expressions over blocks that have layouts."""

    def __init__(
        self, plan: WarpPlan, symbols: dict[str, str], lines: Lines, helpers: Helpers, indices: Indices
    ) -> None:
        super().__init__(False, symbols, plan.tile, lines, helpers, indices)
        self.plan = plan

    def layout(self, axes: Sequence[Axis]) -> str:
        """The name of the layout of blocks over `axes`. Raises UnsupportedError if they have none."""
        plan = self.plan
        known: dict[tuple[Axis, ...], str] = {
            (plan.rows, plan.keys): "SCORES",
            (plan.rows, plan.columns): "RESULTS",
            (plan.rows,): "ROWS",
            (plan.keys,): "KEYS",
            (plan.columns,): "COLUMNS",
        }
        if tuple(axes) not in known:
            names = ", ".join(a.name for a in axes)
            raise UnsupportedError(f"a block over {names} in a specialised kernel", phase="emit")
        return known[tuple(axes)]

    def fit(self, term: Term, wanted: tuple[Axis, ...]) -> Term:
        """As the base class; rows of results have a layout of their own."""
        plan = self.plan
        if term.dims == (plan.rows,) and wanted == (plan.rows, plan.columns):
            text = self.unaligned(term).text
            term = Term(f"gl.convert_layout({text}, RESULT_ROWS)", ATOM, term.dims)
        return super().fit(term, wanted)

    def union(self, terms: Iterable[Term]) -> tuple[Axis, ...]:
        """As the base class; no block has keys and columns of results."""
        found = super().union(terms)
        if found:
            self.layout(found)
        return found

    def spread(self, term: Term, wanted: tuple[Axis, ...], dtype: DType) -> Term:
        """As the base class; a block that is made has its layout."""
        if not wanted or (term.dims and (term.dims == wanted or not term.number)):
            return super().spread(term, wanted, dtype)
        text = f"gl.full({self.shape(wanted)}, {term.text}, {type_of(dtype)}, {self.layout(wanted)})"
        return Term(text, ATOM, wanted)

    def scalar(self, number: str, type_: str) -> Term:
        """As the base class; what has no dimensions has no layout."""
        return Term(f"gl.to_tensor({number}).to({type_})")

    def _float_call(self, e: Expr, args: list[Term]) -> Term:
        if e.op == "sigmoid":  # in Triton a function of its own language
            return self.call(self.helpers.use("logistic"), args)
        return super()._float_call(e, args)
