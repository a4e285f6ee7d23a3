"""From a module to its graph with library calls chosen and specialised, for tests of that phase."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from tests.support.ops.captured_op import trace
from torch import Tensor, nn

from tilewright.accuracy import compare
from tilewright.capture.fx import from_fx
from tilewright.interp import run_graph
from tilewright.ir.graph import Graph, Op
from tilewright.library.offers.offer import Maker
from tilewright.library.select import select
from tilewright.library.specialise import specialise
from tilewright.options import Options
from tilewright.rewrite import interpret
from tilewright.rewrite.normal.normalise import normalise
from tilewright.runtime.cpu.toolchain import host_target
from tilewright.runtime.own.product import ProductCalls
from tilewright.runtime.store.cache import ContentStore, default_root
from tilewright.target import PRESETS, Target


@functools.cache
def products() -> ProductCalls:
    """Our own products, built once for all tests."""
    options = Options.make({})
    return ProductCalls(host_target(), ContentStore(default_root(options)), options)


def captured(
    module: nn.Module,
    args: Sequence[Tensor],
    *,
    frozen: bool = True,
    dynamic: Sequence[Sequence[bool]] | None = None,
) -> Graph:
    """The graph of a module in eval mode; its parameters and buffers are constants if `frozen`, else inputs behind
    `args`."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = [t.detach() for t in state.values()]
    count = len(args)

    def call(*flat: Tensor) -> object:
        return torch.func.functional_call(module, dict(zip(state, flat[count:], strict=True)), flat[:count])

    marks = None if dynamic is None else [*dynamic, *([False] * t.dim() for t in tensors)]
    gm = trace(call, [*args, *tensors], marks)
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"][count:]
    kept = [n for n in gm.graph.nodes if n.op == "placeholder"][-len(tensors) :] if tensors else []
    return from_fx(
        gm, frozen=dict(zip([n.name for n in kept], tensors, strict=True)) if frozen and names else None
    )


def fast(
    graph: Graph, maker: Maker | None = None, *, exact: bool = True, target: Target = PRESETS["x86-64-v4"]
) -> Graph:
    """The graph as it goes into fusion."""
    done = specialise(normalise(select(graph), interpret), target, maker, exact=exact)
    done.verify()
    return normalise(done, interpret)


def calls(graph: Graph) -> list[str]:
    """Names of the library calls, in order."""
    return [op.call.name for op in graph.ops if op.call is not None]


def generated(graph: Graph) -> list[Op]:
    """The ops that stay for kernels, without views."""
    return [op for op in graph.ops if op.expr is not None and not op.expr.is_view()]


def agrees(graph: Graph, module: Callable[..., Tensor], args: Sequence[Tensor], *others: Tensor) -> None:
    """Assert the fp64 rule for the graph's one output."""
    with torch.no_grad():
        (made,) = run_graph(graph, [*args, *others])
        eager = module(*args)
        wide = _wide(module)(*[a.double() if a.is_floating_point() else a for a in args])
    ours = torch.from_numpy(np.asarray(made))
    # One op has few roundings: the largest of many elements may lie further off than twice eager's quantile.
    verdict = compare(ours, eager, wide, k=4)
    assert verdict.passed, str(verdict)


def _wide(module: Callable[..., Tensor]) -> Callable[..., Tensor]:
    import copy

    return copy.deepcopy(module).double() if isinstance(module, nn.Module) else module
