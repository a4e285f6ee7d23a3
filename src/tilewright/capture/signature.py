"""What a captured program takes and gives, read from what torch captured."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from tilewright.ir.expr import Expr
from tilewright.ir.sizes import dims

from .described import FreeSize, Signature, TensorInfo
from .exported import Exported
from .symbols import Symbols


def signature_of_program(program: Exported, inputs: Sequence[str], outputs: Sequence[str]) -> Signature:
    """Of an exported or traced program; its own names where `inputs` or `outputs` are too few."""
    by_name = {n.name: n for n in program.gm.graph.nodes if n.op == "placeholder"}
    given = [
        (inputs[k] if len(inputs) == len(program.inputs) else name, by_name[name].meta["val"])
        for k, name in enumerate(program.inputs)
        if name in by_name
    ]
    (results,) = program.gm.graph.output_node().args
    assert isinstance(results, (tuple, list))
    made = [
        r.meta.get("val") if isinstance(r, fx.Node) else r
        for k, r in enumerate(results)
        if k not in program.writes
    ]
    return _signature(given, made, outputs, program)


def signature_of_call(gm: fx.GraphModule, parameters: Sequence[str]) -> Signature:
    """Of what Dynamo captured: the tensors that arguments bring, `parameters` being their names in order."""
    given: list[tuple[str, object]] = []
    for node in gm.graph.nodes:
        argument = node.meta.get("grapharg") if node.op == "placeholder" else None
        name = _argument_name(argument, parameters)
        if name is not None:
            given.append((name, node.meta.get("example_value")))
    (results,) = gm.graph.output_node().args
    made = [
        r.meta.get("example_value", r.meta.get("val")) if isinstance(r, fx.Node) else r
        for r in pytree.tree_leaves(results, is_leaf=lambda x: isinstance(x, fx.Node))
    ]
    order = {name: k for k, name in enumerate(parameters)}
    given.sort(key=lambda pair: order.get(re.split(r"[\[.]", pair[0])[0], len(order)))
    return _signature(given, made, (), None)


_POSITIONAL = re.compile(r"L\['args'\]\[(\d+)\]((?:\[.*\])?)")
_KEYWORD = re.compile(r"L\['(?:kwargs'\]\[')?(\w+)'\]((?:\[.*\])?)")


def _argument_name(argument: object, parameters: Sequence[str]) -> str | None:
    """The name by which a user knows what a placeholder is; None for what no argument brings."""
    source = getattr(argument, "source", None)
    told = getattr(source, "name", None)
    text = told() if callable(told) else told
    if not isinstance(text, str):
        return None
    if found := _POSITIONAL.fullmatch(text):
        k = int(found[1])
        return (parameters[k] if k < len(parameters) else f"arg{k}") + found[2]
    if found := _KEYWORD.fullmatch(text):
        return found[1] + found[2] if found[1] in parameters else None
    return None


def _signature(
    given: Sequence[tuple[str, object]],
    made: Sequence[object],
    outputs: Sequence[str],
    program: Exported | None,
) -> Signature:
    tensors = [(name, x) for name, x in given if isinstance(x, Tensor)]
    results = [x for x in made if isinstance(x, Tensor)]
    env = _environment([*(t for _, t in tensors), *results])
    symbols = Symbols(env, ranges=program.ranges if program is not None else None)
    places: dict[Expr, list[tuple[str, int]]] = {}
    for name, t in tensors:
        for dim, size in enumerate(_sizes(symbols, t)):
            for s in dims.symbols_of(size):
                places.setdefault(s, []).append((name, dim))
    for t in results:
        for s in (s for size in _sizes(symbols, t) for s in dims.symbols_of(size)):
            places.setdefault(s, [])
    names = outputs if len(outputs) == len(results) else _numbered(len(results))
    return Signature(
        tuple(_info(symbols, name, t) for name, t in tensors),
        tuple(_info(symbols, name, t) for name, t in zip(names, results, strict=True)),
        tuple(_free_size(s, where) for s, where in places.items()),
    )


def _environment(tensors: Sequence[Tensor]) -> ShapeEnv | None:
    free = (n for t in tensors if not t.is_nested for n in t.shape if isinstance(n, torch.SymInt))
    return next((n.node.shape_env for n in free), None)


def _numbered(count: int) -> Iterator[str]:
    return (f"output{k}" for k in range(count))


def _free_size(s: Expr, places: Sequence[tuple[str, int]]) -> FreeSize:
    low, high = dims.int_range(s)
    name = repr(s)
    return FreeSize(name, name, tuple(dict.fromkeys(places)), low, high)


def _sizes(symbols: Symbols, t: Tensor) -> tuple[Expr, ...]:
    return symbols.shape(tuple(t.shape)) if t.layout is torch.strided and not t.is_nested else ()


def _info(symbols: Symbols, name: str, t: Tensor) -> TensorInfo:
    if t.layout is not torch.strided or t.is_nested:
        return TensorInfo(name, t.dtype, None)
    sizes = _sizes(symbols, t)
    shape = tuple(n if (n := dims.static(e)) is not None else repr(e) for e in sizes)
    return TensorInfo(name, t.dtype, shape)
