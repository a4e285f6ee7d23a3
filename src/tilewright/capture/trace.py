"""Modules that we trace ourselves (model files): one pass with fake tensors, in which weights become constants."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    free_unbacked_symbols,
)
from torch.utils import _pytree as pytree

from tilewright.capture.loops.op import keeping_loops
from tilewright.capture.loops.recurrent import recurrent_loops
from tilewright.errors import TilewrightError, UnsupportedError
from tilewright.ir.expr import Symbol, integer
from tilewright.ir.sizes.dims import ZERO, coefficient, mul, static, symbols_of
from tilewright.ir.sizes.host import Number, number

from .aten import decompositions, preserve_resampling
from .empty_operands import take_empty_operands
from .environment import conditions, lengths
from .exported import Exported
from .node import mutations
from .placement.dense_inputs import without_gaps
from .symbols import Symbols
from .torch_declarations import any_kernels

Place = tuple[int, int]
"""Number of an input and number of its dim."""


def trace(
    module: torch.nn.Module,
    inputs: Sequence[Tensor],
    dynamic: Sequence[Sequence[int]],
    equal: Sequence[Sequence[Place]] = (),
    *,
    oblivious: bool = True,
) -> Exported:
    """The functional graph of `module` for inputs like these.

    `dynamic[i]` are the dims of input i that may change, and dims in one group of `equal` have one size. With
    `oblivious`, sizes 0 and 1 are sizes like others. What the trace relied on besides stands in `Exported.conditions`.
    Raises UnsupportedError where the module cannot be traced as one graph."""
    env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    # With symbols, to find a form that was computed before takes longer than to compute it again.
    mode.cache_enabled = not any(dynamic)
    spec: list[pytree.TreeSpec] = []
    table = {k: v for k, v in decompositions().items() if isinstance(k, OpOverload)}
    table[torch.ops.aten.slice_copy.Tensor] = _slice

    def flat(*args: Tensor) -> list[object]:
        for (first, at), *others in equal:
            for i, place in others:
                torch._check(args[i].shape[place] == args[first].shape[at])
        leaves, structure = pytree.tree_flatten(module(*args))
        spec.append(structure)
        return leaves

    try:
        with torch.no_grad(), _config.patch(backed_size_oblivious=oblivious), enable_python_dispatcher():
            examples = map(without_gaps, _apart(inputs))
            fakes = [_fake(mode, t, dims) for t, dims in zip(examples, dynamic, strict=True)]
            pure = torch.func.functionalize(flat, remove="mutations_and_views")
            with mode, preserve_resampling(), keeping_loops(), recurrent_loops(), any_kernels():
                gm = make_fx(pure, decomposition_table=table, _allow_non_fake_inputs=True)(*fakes)
                if mutations(gm):  # composites that torch took apart below its functionalisation
                    pure = torch.func.functionalize(gm, remove="mutations")
                    gm = make_fx(pure, decomposition_table=table, _allow_non_fake_inputs=True)(*fakes)
    except TilewrightError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"the model cannot be traced as one graph: {type(error).__name__}: {str(error).splitlines()[0]}",
            phase="capture", place="; ".join(getattr(error, "__notes__", ())),
        ) from error  # fmt: skip
    take_empty_operands(gm)
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    _, in_spec = pytree.tree_flatten((tuple(inputs), {}))
    needed = (*conditions(env), *lengths(gm))
    return Exported(gm, {}, {}, tuple(names), {}, {}, in_spec, spec[-1], needed)


def _slice(
    x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """A slice of so many elements as data say: the view that it was before functionalisation. Torch names that one's
    size without asking which of two sizes is the larger; for the copy it asks, and there is no answer."""
    if free_unbacked_symbols([n for n in (x.shape[dim], start, end) if n is not None]):
        return torch.ops.aten.slice.Tensor(x, dim, start, end, step)
    return NotImplemented


def _apart(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The inputs, with another tensor like it where one stands for two: a tensor has one fake, which would be one
    input in the trace."""
    found: dict[int, Tensor] = {}
    for t in inputs:
        known = t if id(t) not in found else torch.empty_like(t)
        found[id(known)] = known
    return list(found.values())


def _fake(mode: FakeTensorMode, t: Tensor, dims: Sequence[int]) -> Tensor:
    kinds = [DimDynamic.DYNAMIC if d in dims else DimDynamic.STATIC for d in range(t.dim())]
    return mode.from_tensor(t, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))


def fits(program: Exported, inputs: Sequence[Tensor]) -> bool:
    """Whether the sizes of `inputs` fulfil the conditions of a traced program."""
    sizes: dict[str, Number] = {}
    places = [n for n in program.gm.graph.nodes if n.op == "placeholder"]
    for node, t in zip(places, inputs, strict=True):
        for symbolic, n in zip(node.meta["val"].shape, t.shape, strict=True):
            if isinstance(symbolic, torch.SymInt):
                e = Symbols(symbolic.node.shape_env).expr(symbolic)
                for s in symbols_of(e):
                    by = static(coefficient(e, s) or ZERO)
                    if isinstance(s.value, Symbol) and by and e is mul(s, integer(by)):
                        if n % by:
                            return False
                        sizes.setdefault(s.value.name, n // by)
            elif symbolic != n:
                return False
    return all(number(c, sizes) for c in program.conditions)


def hints(inputs: Sequence[Tensor], dynamic: Sequence[Mapping[int, object]]) -> list[Tensor]:
    """Inputs to trace with: those given, but with size 2 where a dynamic dim has size 0 or 1."""
    found: list[Tensor] = []
    for t, dims in zip(inputs, dynamic, strict=True):
        shape = [max(2, n) if d in dims else n for d, n in enumerate(t.shape)]
        found.append(t if shape == list(t.shape) else torch.zeros(shape, dtype=t.dtype, device=t.device))
    return found
