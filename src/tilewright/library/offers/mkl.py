"""Matrix products with frozen weights as MKL does them: on its own packed form where the rows are known, or on the
plain weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from tilewright.ir.expr import Expr
from tilewright.ir.graph import LibraryCall, Operand
from tilewright.ir.ops.epilogue import total
from tilewright.ir.sizes import dims
from tilewright.ir.task import Product
from tilewright.target import Target

from .offer import Epilogue, Fusible, KnownOperands, Offer

mkl = torch.ops.mkl


def offers(known: KnownOperands, target: Target) -> Sequence[Offer]:
    """The ways to multiply by a frozen weight [N, K]."""
    del target
    task, bias = known.task, known.bias
    if not isinstance(task, Product) or not torch.backends.mkl.is_available():
        return ()
    rows = dims.static(dims.prod(task.shape[:-1]))
    found = [Offer("plain", lambda: MklLinear(known.used_weight(), bias, task.shape).call())]
    if rows:
        found.append(Offer("mkl", lambda: packed_for(known.used_weight(), rows, bias, task.shape).call()))
    return found


def packed_for(weight: Tensor, rows: int, bias: Tensor | None, shape: tuple[Expr, ...]) -> MklLinear:
    """The product with a weight that is packed for so many rows."""
    held = weight.contiguous()
    return MklLinear(held, bias, shape, mkl._mkl_reorder_linear_weight.default(held, rows), rows)


@dataclass(frozen=True, eq=False)
class MklLinear(Fusible):
    """x [.., K] times a frozen weight, which may be `packed` for so many `rows`, plus a vector."""

    weight: Tensor
    bias: Tensor | None
    shape: tuple[Expr, ...]
    packed: Tensor | None = None
    rows: int = 0

    def call(self) -> LibraryCall:
        """The library call on x."""
        return LibraryCall(
            "mkl.linear", self, (Operand(0),), strides=(dims.dense_strides(self.shape),), reason="contraction", rows=0,
            reuses=-1,
        )  # fmt: skip

    def bind(self) -> Callable[[Tensor], Tensor]:
        """What runs."""
        weight, bias, packed, rows = self.weight, self.bias, self.packed, self.rows
        if packed is None:
            return lambda x: linear(x, weight, bias)
        multiply = mkl._mkl_linear.default
        return lambda x: multiply(x, packed, weight, bias, rows)

    def epilogues(self) -> Sequence[Epilogue]:
        """See `Fusible`."""
        return [] if self.bias is not None else [Epilogue(total(), self.shifted, "channel")]

    def shifted(self, _: tuple[float, ...], vector: object) -> LibraryCall:
        """The call with a bias."""
        assert isinstance(vector, Tensor)
        return replace(self, bias=vector.detach().reshape(-1).contiguous()).call()
