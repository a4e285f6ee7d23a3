"""Results that torch makes anew from an input: what the program gives in their place must lie there.

A program writes into an input and returns a view of it. Its graph has no writes but at the end, so that it returns a
view of the value that is written back, and torch makes the user's view of the input itself. With sizes that are not
known it reads strides and place off what the graph returned: the place in the input's storage, which the graph, that
makes memory of its own, does not know. It is nowhere guarded either, so that each call asks the input. And the strides
are the view's only if the value lies as the input does; else eager mode runs the program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import TracingContext
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from tilewright.capture.opaque import Runner, returned

from .memory import storage_of
from .overlapping import OverlappingWrite
from .shares import has_sizes, is_write


def in_place(gm: fx.GraphModule, runner: Runner) -> Runner:
    """`runner` with such results as views of the inputs."""
    like = _regained(gm) if has_sizes(gm) else []
    if not like:
        return runner
    plain: Callable[[], Runner] | None = getattr(runner, "entry", None)
    inner, number = runner if plain is None else plain(), _numbers(gm)

    def run(args: list[object]) -> list[object]:
        seen = [args[view.of] for view in like]
        bindings = {size: args[i] for size, i in number.items()}
        results = inner(args)
        for view, x in zip(like, seen, strict=True):
            r = results[view.result]
            if isinstance(r, Tensor) and isinstance(x, Tensor) and not _is_same(r, x):
                results[view.result] = x.as_strided(
                    r.shape, r.stride(), x.storage_offset() + view.at(bindings)
                )
        return results

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


@dataclass(frozen=True, slots=True)
class _Regained:
    """A result that shows a value written back into an input: its number, its input's, and how far behind the value it
    begins. The result's own memory does not say: some calls make a value at the place where their operand has it."""

    result: int
    of: int
    behind: sympy.Expr

    def at(self, bindings: dict[sympy.Symbol, object]) -> int:
        """`behind` for these sizes."""
        return int(sympy_interp(PythonReferenceAnalysis, bindings, self.behind))


def _numbers(gm: fx.GraphModule) -> dict[sympy.Symbol, int]:
    """Which input of the program each size is."""
    vals = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
    sizes = {i: v.node.expr for i, v in enumerate(vals) if isinstance(v, torch.SymInt)}
    return {e: i for i, e in sizes.items() if isinstance(e, sympy.Symbol)}


def _place(node: fx.Node) -> sympy.Expr:
    """Where the tensor of a node begins in its storage."""
    offset = node.meta["val"].storage_offset()
    return offset.node.expr if isinstance(offset, torch.SymInt) else sympy.Integer(offset)


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _strides(node: object) -> list[object]:
    """The strides of a tensor's dims, as expressions, which ask nothing of sizes that are not known."""
    val = node.meta["val"] if isinstance(node, fx.Node) else None
    assert isinstance(val, Tensor)
    steps = zip(val.shape, val.stride(), strict=True)
    return [
        s.node.expr if isinstance(s, torch.SymInt) else s for n, s in steps if type(n) is not int or n > 1
    ]


def _regained(gm: fx.GraphModule) -> list[_Regained]:
    """The results that torch makes anew from inputs that the graph writes into, each with its input."""
    context = TracingContext.try_get()
    facts = getattr(context, "fw_metadata", None)
    if facts is None:
        return []
    number = {n: i for i, n in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}
    places = gm.graph.find_nodes(op="placeholder")
    results, count = returned(gm), facts.num_mutated_inp_runtime_indices
    pairs = [(n.args[1], n.args[0]) for n in gm.graph.nodes if is_write(n)]
    pairs += [(r, places[i]) for r, i in zip(results[:count], facts.mutated_inp_runtime_indices, strict=True)]
    written = {storage_of(value): (value, place) for value, place in pairs}
    lies_as = {storage_of(value): _strides(value) == _strides(place) for value, place in pairs}
    found: list[_Regained] = []
    sizes = _numbers(gm).keys()
    nodes = results[count:]
    for k, (node, of) in enumerate(zip(nodes, facts.output_info, strict=False)):
        value, source = written.get(storage_of(node), (None, None))
        if of.output_type is OutputType.alias_of_input and isinstance(source, fx.Node) and source in number:
            if not lies_as[storage_of(node)]:
                raise OverlappingWrite(
                    "a view of an input with gaps, of free sizes, that the program writes and returns", phase="capture",
                    hint="return a copy (`clone()`) of it",
                )  # fmt: skip
            assert isinstance(value, fx.Node) and isinstance(node, fx.Node)
            behind = _place(node) - _place(value)
            if not behind.free_symbols <= sizes:
                raise OverlappingWrite(
                    "a view of an input that the program writes and returns begins where data says", phase="capture",
                    hint="return a copy (`clone()`) of it",
                )  # fmt: skip
            found.append(_Regained(count + k, number[source], behind))
    return found
