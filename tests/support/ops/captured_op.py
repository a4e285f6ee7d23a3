"""From a torch function to its captured graph, and the comparison of the graph's meaning with eager."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_leaves

from tilewright.capture.aten import decompositions, preserve_resampling
from tilewright.capture.fx import from_fx
from tilewright.interp import run_graph
from tilewright.ir.graph import Graph

TABLE = decompositions()
Sizes = Mapping[str, int]
Function = Callable[..., object]


@dataclass(frozen=True)
class Arg:
    """One tensor argument: dims by name (dynamic) or number, and what its elements are: "x" (of the tested type),
    "bool", "positive", "unit" (in (0, 1)), or an index below dim `below` ("signed" ones also count from the end)."""

    dims: str
    kind: str = "x"
    below: str = ""

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(int(d) if d.isdigit() else sizes[d] for d in self.dims.split())

    def make(self, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        shape = self.shape(sizes)
        if self.kind == "bool":
            return torch.rand(shape) < 0.5
        if self.kind in ("index", "signed"):
            limit = max(int(self.below) if self.below.isdigit() else sizes[self.below], 1)
            return torch.randint(-limit if self.kind == "signed" else 0, limit, shape)
        if self.kind in ("positive", "unit"):
            high = 0.9 if self.kind == "unit" else 3.0
            return (torch.rand(shape) * (high - 0.1) + 0.1).to(dtype)
        if dtype.is_floating_point:
            return torch.randn(shape).to(dtype)
        return (
            torch.randint(0, 2, shape).bool()
            if dtype is torch.bool
            else torch.randint(-5, 6, shape).to(dtype)
        )


class _Captured(Exception):
    """Leaves AOTAutograd as soon as it has the graph."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self.gm = gm
        super().__init__("captured")


def capture(
    fn: Function, args: Sequence[torch.Tensor], dynamic: Sequence[Sequence[bool]] | None = None
) -> Graph:
    """The graph of `fn`; `dynamic[k][d]` says whether dim d of argument k becomes a symbol. No guard is added after
    torch's own tracing."""
    gm = trace(fn, args, dynamic)
    env = _shape_env(gm)
    before = len(env.guards) if env is not None else 0
    graph = from_fx(gm)
    assert env is None or len(env.guards) == before
    return graph


def trace(
    fn: Function, args: Sequence[torch.Tensor], dynamic: Sequence[Sequence[bool]] | None = None
) -> torch.fx.GraphModule:
    """What AOTAutograd hands to an inference compiler."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    marks = dynamic or [[False] * t.dim() for t in args]
    given = [_symbolic(mode, t, d) for t, d in zip(args, marks, strict=True)]

    def leave(gm: torch.fx.GraphModule, _: object) -> object:
        raise _Captured(gm)

    whole = aot_function(
        lambda *a: tree_leaves(fn(*a)), fw_compiler=leave, inference_compiler=leave, decompositions=TABLE,
        keep_inference_input_mutations=True,
    )  # fmt: skip
    try:
        with warnings.catch_warnings(), torch.no_grad(), preserve_resampling():
            warnings.simplefilter("ignore")
            whole(*given)
    except _Captured as done:
        return done.gm
    raise AssertionError("AOTAutograd returned without a graph")


def _shape_env(gm: torch.fx.GraphModule) -> ShapeEnv | None:
    for node in gm.graph.nodes:
        for t in tree_leaves(node.meta.get("val")):
            if isinstance(t, torch.Tensor):
                return t.fake_mode.shape_env  # type: ignore[attr-defined]
    return None


def _symbolic(mode: FakeTensorMode, t: torch.Tensor, dynamic: Sequence[bool]) -> torch.Tensor:
    choice = [DimDynamic.DYNAMIC if d else DimDynamic.STATIC for d in dynamic]
    return mode.from_tensor(t, symbolic_context=StatelessSymbolicContext(dynamic_sizes=choice))


def agree(graph: Graph, fn: Function, args: Sequence[torch.Tensor]) -> None:
    """Assert that the graph's meaning is what eager computes."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        want = [t for t in tree_leaves(fn(*args)) if isinstance(t, torch.Tensor)]
    with np.errstate(all="ignore"):
        got = run_graph(graph, [t if t.dtype is torch.bfloat16 else t.numpy() for t in args])
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        same(np.asarray(ours), theirs)


def same(ours: np.ndarray, theirs: torch.Tensor) -> None:
    """Assert equal shapes, equal integers, and floats equal up to a few roundings."""
    assert ours.shape == tuple(theirs.shape)
    if not theirs.dtype.is_floating_point:
        np.testing.assert_array_equal(ours, theirs.numpy())
        return
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5}.get(theirs.dtype, 2e-2)
    reference = theirs.double().numpy()
    finite = reference[np.isfinite(reference)]
    floor = tolerance * max(1.0, float(np.sqrt(np.mean(finite**2))) if finite.size else 1.0)
    np.testing.assert_allclose(ours.astype(np.float64), reference, rtol=tolerance, atol=floor, equal_nan=True)


def library_calls(graph: Graph) -> list[str]:
    """Names of the ops that are not generated."""
    return [op.call.name for op in graph.ops if op.call is not None]
