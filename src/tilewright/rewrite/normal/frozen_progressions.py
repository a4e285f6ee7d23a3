"""Short frozen vectors of whole numbers with even steps become arithmetic of their index: shifts of packed numbers,
places that are told apart.

A kernel then has a constant where it would load a number for each element."""

from __future__ import annotations

import torch

from tilewright.ir.dtype import DType, bool_
from tilewright.ir.expr import Expr, axis, cast
from tilewright.ir.graph import Graph, Value
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import output_axes
from tilewright.tuning.thresholds import MASKS

from .frozen_masks import without_buffers
from .normalise import drop_dead, simplify


def recognise_progressions(graph: Graph) -> Graph:
    """The graph in which reads of such vectors are what they hold at an index. Reads at indices from data stay (an
    index out of bounds must raise), and so do library calls."""
    known: dict[Value, Expr] = {}
    for v, tensor in graph.constants.items():
        if isinstance(tensor, torch.Tensor) and (found := progression(tensor, v.dtype)) is not None:
            known[v] = found
    if not known:
        return graph
    return drop_dead(simplify(graph.with_ops([without_buffers(op, known) for op in graph.ops])))


def progression(tensor: torch.Tensor, dtype: DType) -> Expr | None:
    """An expression over the axes of a short vector of whole numbers that equals every element of it, or None: a number
    and equal steps from there. All but one dim have a single element."""
    long = [d for d, n in enumerate(tensor.shape) if n != 1]
    if dtype.is_float or dtype is bool_ or tensor.is_complex() or tensor.device.type == "meta":
        return None
    if len(long) != 1 or not 1 < tensor.numel() <= MASKS.max_progression_elements:
        return None
    values: list[int] = tensor.detach().reshape(-1).tolist()
    first, step = values[0], values[1] - values[0]
    if values != [first + n * step for n in range(len(values))]:
        return None
    place = axis(output_axes(tuple(map(dims.integer, tensor.shape)))[long[0]])
    return cast(dims.add(dims.integer(first), dims.mul(place, dims.integer(step))), dtype)
