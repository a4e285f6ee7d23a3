"""What torch knows of the sizes of a captured graph: their environment, what was assumed of them, what they were."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from tilewright.ir.expr import Expr, call
from tilewright.ir.sizes import dims

from .symbols import Ranges, Symbols, factor_name, factors

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def conditions(env: ShapeEnv | None, ranges: Ranges | None = None) -> tuple[Expr, ...]:
    """What a trace assumed of its sizes, which are in `ranges`, as expressions that must be true.

    A trace takes each free size for more than 1, and an exported program, which has `ranges`, is run at whatever its
    author allows: what holds for all sizes from 2 on is none of its conditions, except as `unsqueezed` says. (Where a
    program comes from a file, torch asks whether a size that may be 1 is 1, and guards the answer.)
    """
    if env is None:
        return ()
    symbols = Symbols(env, guarded=False, ranges=ranges)
    asked = [g.expr for g in env.guards if ranges is None or not _is_true_from_two_on(g.expr, ranges)]
    return tuple(symbols.expr(torch.SymBool(SymNode(e, env, bool, True))) for e in asked)


def _is_true_from_two_on(fact: sympy.Basic, ranges: Ranges) -> bool:
    from_two: dict[sympy.Symbol, ValueRanges[sympy.Expr]] = {}
    for size in fact.atoms(sympy.Symbol):
        known = ranges.get(size)
        if known is None or known.upper < 2:
            return False
        from_two[size] = ValueRanges(sympy.Max(known.lower, 2), known.upper)
    return bound_sympy(fact, from_two).lower is sympy.true  # pyright: ignore[reportArgumentType]


aten = torch.ops.aten
_SQUEEZES = (aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)


def unsqueezed(gm: fx.GraphModule, ranges: Ranges) -> tuple[Expr, ...]:
    """That no size, of those in `ranges`, is 1 where a squeeze kept its dim: the results would have other shapes."""
    symbols, found = Symbols(shape_env(gm), guarded=False, ranges=ranges), dict[Expr, None]()
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    for node in (n for graph in graphs for n in graph.nodes if n.target in _SQUEEZES):
        of, *over = node.args
        shape = of.meta["val"].shape
        asked = over[0] if over else range(len(shape))
        for n in [shape[d] for d in ([asked] if isinstance(asked, int) else asked)] if shape else ():
            if isinstance(n, torch.SymInt) and not free_unbacked_symbols(n):
                found[symbols.expr(n)] = None
    return tuple(call("ne", e, dims.ONE) for e in found if not dims.at_least(e, 2))


def lengths(gm: fx.GraphModule) -> tuple[Expr, ...]:
    """That no tensor of a trace has fewer than 0 elements along a dim, where its sizes do not say so themselves: torch
    takes a size for more than 0 when it looks for the larger of two, also where it allows 0."""
    env = shape_env(gm)
    symbols, found = Symbols(env), dict[Expr, None]()
    for node in gm.graph.nodes if env is not None else ():
        for leaf in tree_leaves(node.meta.get("val")):
            for n in leaf.shape if isinstance(leaf, Tensor) else ():
                if isinstance(n, torch.SymInt) and not free_unbacked_symbols(n):
                    found[symbols.expr(n)] = None
    return tuple(call("le", dims.ZERO, e) for e in found if not dims.at_least(e, 0))


def shape_env(gm: fx.GraphModule) -> ShapeEnv | None:
    """The sizes' environment of a captured graph, if any size or host scalar is symbolic."""
    for node in gm.graph.nodes:
        for leaf in tree_leaves(node.meta.get("val")):
            for part in leaf.shape if isinstance(leaf, Tensor) else (leaf,):
                if isinstance(part, SYMBOLIC):
                    return part.node.shape_env
    return None


def traced_sizes(gm: fx.GraphModule) -> dict[str, int]:
    """The sizes that the symbols of a captured graph had when it was traced, as far as they are known."""
    env = shape_env(gm)
    held = getattr(env, "backed_var_to_val", None)
    if held is None:  # torch 2.11
        held = getattr(env, "var_to_val", None) or {}
    sizes = {str(symbol): int(value) for symbol, value in held.items() if value.is_number}
    for symbol, by in factors(env).items():
        if str(symbol) in sizes:
            sizes[factor_name(symbol, by)] = sizes[str(symbol)] // by
    return sizes
