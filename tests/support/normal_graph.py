"""A torch function as a normalised graph, with sizes static or symbolic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright.capture.aten import decompositions
from tilewright.capture.fx import from_fx
from tilewright.ir.graph import Graph, Op, Value
from tilewright.rewrite.normal.normalise import normalise


class Function(torch.nn.Module):
    """A function as a module."""

    def __init__(self, run: Callable[..., object]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *args: Tensor) -> object:
        return self.run(*args)


def capture(
    run: Callable[..., object] | torch.nn.Module,
    inputs: Sequence[Tensor],
    dynamic: Sequence[dict[int, str]] = (),
    frozen: bool = False,
) -> Graph:
    """The normalised graph of `run`; `dynamic` names, per input, the dims that are symbols."""
    shapes = None
    if dynamic:
        made = {n: torch.export.Dim.DYNAMIC for per in dynamic for n in per.values()}
        shapes = (tuple({d: made[n] for d, n in per.items()} or None for per in dynamic),)
    if shapes is not None and isinstance(run, torch.nn.Module):
        (shapes,) = shapes
    module = run if isinstance(run, torch.nn.Module) else Function(run)
    if not dynamic and not frozen:
        return normalise(from_fx(make_fx(module, decompositions(), tracing_mode="fake")(*inputs)))
    program = torch.export.export(module, tuple(inputs), dynamic_shapes=shapes, strict=False)
    gm = program.run_decompositions(decompositions()).graph_module
    if not frozen:
        return normalise(from_fx(gm))
    tensors = {**program.state_dict, **program.constants}
    names = {
        s.arg.name: tensors[s.target]
        for s in program.graph_signature.input_specs
        if s.target is not None and s.target in tensors
    }
    return normalise(from_fx(gm, frozen=names))


def made_by(graph: Graph, name: str, which: int = -1) -> Op:
    """An op by its name (the last one unless told)."""
    return [op for op in graph.ops if op.name == name][which]


def results(graph: Graph) -> list[Value]:
    """The outputs that are tensors."""
    return [v for v in graph.outputs if isinstance(v, Value)]
