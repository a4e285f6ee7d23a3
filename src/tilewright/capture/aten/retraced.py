"""An exported program that writes nothing, in the ops that we declare: one trace where torch makes two.

Torch's own `run_decompositions` runs a program once to learn what it writes, traces it, then checks and
names all that it made. Of a program without writes, bodies or values from data nothing of that is to be learnt."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor, fx
from torch._C import _dispatch_get_registrations_for_dispatch_key  # pyright: ignore[reportPrivateImportUsage]
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.exported_program import (
    _override_composite_implicit_decomp,
    _split_decomp_table_to_cia_and_python_decomp,
)
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.traceback import preserve_node_meta

from .decompose import Decompositions, decompositions

_TAKEN = (InputKind.USER_INPUT, InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def retraced(program: ExportedProgram) -> fx.GraphModule | None:
    """The graph of a program without writes, its placeholders named as before; None where torch's own way must be
    gone."""
    gm = program.graph_module
    if not _is_plain(program) or not _has_its_weights(program):
        return None
    places = gm.graph.find_nodes(op="placeholder")
    given = [n.meta["val"] for n in places]
    modes = {id(t.fake_mode): t.fake_mode for t in given}
    if len(modes) != 1:
        return None
    made = _named(_trace(gm, given, *modes.values()), [n.name for n in places])
    return made if all(_is_functional(n) for n in made.graph.nodes) else None


def _trace(gm: fx.GraphModule, given: Sequence[FakeTensor], mode: FakeTensorMode) -> fx.GraphModule:
    from torch.export._trace import _ignore_backend_decomps  # brings Dynamo, which model files do without

    composites, table = _tables(
        tuple(_dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
    )
    with (
        torch.no_grad(), _ignore_backend_decomps(), _override_composite_implicit_decomp(composites), mode,
        enable_python_dispatcher(), preserve_node_meta(),
    ):  # fmt: skip
        return make_fx(fx.Interpreter(gm).run, decomposition_table=table)(*given)


@lru_cache(1)
def _tables(known: tuple[str, ...]) -> tuple[Decompositions, dict[OpOverload, Callable[..., object]]]:
    """What stands for composites and for other ops, given the composites that torch knows by now: to tell them apart
    torch looks at every op."""
    del known
    composites, others = _split_decomp_table_to_cia_and_python_decomp(decompositions())
    return composites, {op: parts for op, parts in others.items() if isinstance(op, OpOverload)}


def _named(gm: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """The same graph without what is not used, its placeholders by these names: an op of such a name gets another."""
    graph, found, left = fx.Graph(), dict[fx.Node, fx.Node](), iter(names)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            name = next(left)
            found[node] = made = graph.placeholder(name)
            made.name = made.target = (
                name  # torch's exporter keeps names of Python's own functions (`input`), too
            )
            made.meta = dict(node.meta)
        else:
            found[node] = graph.node_copy(node, found.__getitem__)
    graph.eliminate_dead_code()
    return fx.GraphModule(gm, graph)


def _is_plain(program: ExportedProgram) -> bool:
    """Whether a program takes and returns tensors alone and is made of torch's own ops, none of which writes, runs a
    body or makes sizes of data."""
    signature, gm = program.graph_signature, program.graph_module
    if any(s.kind not in _TAKEN for s in signature.input_specs):
        return False
    if any(s.kind is not OutputKind.USER_OUTPUT for s in signature.output_specs):
        return False
    return all(_is_functional(n) and not _depends_on_data(n) for n in gm.graph.nodes) and all(
        type(n.meta.get("val")) is FakeTensor for n in gm.graph.find_nodes(op="placeholder")
    )


def _has_its_weights(program: ExportedProgram) -> bool:
    """Whether what a program holds has the forms that its graph was made for: a file may say otherwise."""
    held = {**program.state_dict, **program.constants}
    places = program.graph_module.graph.find_nodes(op="placeholder")
    for node, spec in zip(places, program.graph_signature.input_specs, strict=True):
        if spec.kind is not InputKind.USER_INPUT:
            given, wanted = held.get(spec.target or ""), node.meta["val"]
            if not isinstance(given, Tensor) or (given.shape, given.dtype) != (wanted.shape, wanted.dtype):
                return False
    return True


def _is_functional(node: fx.Node) -> bool:
    """Whether a node does nothing but to make its result: one of torch's own ops, or arithmetic of sizes."""
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    target = node.target
    if not isinstance(target, OpOverload):
        return getattr(target, "__module__", "") == operator.getitem.__module__
    schema = target._schema
    makes = (
        bool(schema.returns) or target is torch.ops.aten._assert_tensor_metadata.default
    )  # of types that are known
    return target.namespace == "aten" and makes and not schema.is_mutable


def _depends_on_data(node: fx.Node) -> bool:
    val = node.meta.get("val")
    parts: tuple[object, ...] = tuple(val) if isinstance(val, (list, tuple)) else (val,)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return any(
        isinstance(x, (Tensor, torch.SymInt, torch.SymFloat)) and bool(free_unbacked_symbols(x))
        for x in parts
    )
