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
from tilewright.ir.graph import Epilogue, LibraryCall, Operand
from tilewright.ir.ops.epilogue import total
from tilewright.ir.sizes import dims
from tilewright.ir.task import Product
from tilewright.target import Target

from .offer import Known, Offer

mkl = torch.ops.mkl


def offers(known: Known, target: Target) -> Sequence[Offer]:
    """The ways to multiply by a frozen weight [N, K]."""
    del target
    task, bias = known.task, known.bias
    if not isinstance(task, Product) or not torch.backends.mkl.is_available():
        return ()
    rows = dims.static(dims.prod(task.shape[:-1]))
    found = [Offer("plain", lambda: _Linear(_plain(known.used_weight()), bias, task.shape).call())]
    if rows:
        found.append(
            Offer("mkl", lambda: _Linear(_packed(known.used_weight(), rows), bias, task.shape).call())
        )
    return found


Form = Callable[[Tensor | None], Callable[[Tensor], Tensor]]
"""Makes what runs, of a bias."""


def _plain(weight: Tensor) -> Form:
    return lambda bias: lambda x: linear(x, weight, bias)


def _packed(weight: Tensor, rows: int) -> Form:
    held = weight.contiguous()
    packed = mkl._mkl_reorder_linear_weight.default(held, rows)
    multiply = mkl._mkl_linear.default
    return lambda bias: lambda x: multiply(x, packed, held, bias, rows)


@dataclass(frozen=True, slots=True, eq=False)
class _Linear:
    """x [.., K] times a frozen weight, plus a vector."""

    form: Form
    bias: Tensor | None
    shape: tuple[Expr, ...]

    def call(self) -> LibraryCall:
        """The library call on x."""
        epilogues = [] if self.bias is not None else [Epilogue(total(), self.shifted, "channel")]
        return LibraryCall(
            "mkl.linear", self.form(self.bias), (Operand(0),), strides=(dims.dense_strides(self.shape),),
            reason="contraction", epilogues=tuple(epilogues), rows=0, reuses=-1,
        )  # fmt: skip

    def shifted(self, _: tuple[float, ...], vector: object) -> LibraryCall:
        """The call with a bias."""
        assert isinstance(vector, Tensor)
        return replace(self, bias=vector.detach().reshape(-1).contiguous()).call()
