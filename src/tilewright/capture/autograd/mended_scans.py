"""Torch's own differentiation of scans, mended while joint graphs are traced."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops import partitioner as joint_tracing
from torch._higher_order_ops.partitioner import HopGraphMinCutPartitioner, HopJointGraph, HopPartitionedGraph
from torch._higher_order_ops.scan import ScanAutogradImpl, scan_op
from torch._higher_order_ops.utils import redirect_to_mode
from torch.utils.checkpoint import CheckpointPolicy, _CachedTorchDispatchMode, _CachingTorchDispatchMode

from tilewright.capture.loops.recurrent import computes_again

from .draws import keep_draws_apart
from .rng import may_draw


@contextmanager
def mended_scans() -> Generator[None]:
    """While active, torch differentiates scans of which a step passes a gradient on as it is, or of which gradients of
    two results lie in one memory: it refuses those itself. A joint graph, which holds the gradients already, is traced
    a second time without asking for those of its own (complex views and batch norms have none there). Sizes are no
    results of steps, which torch would stack. And what cuts scans into passes does not tell all that it does, as some
    versions ask it to."""
    logger = logging.getLogger("torch._higher_order_ops.partitioner")
    level, partitioner = logger.level, HopGraphMinCutPartitioner
    plain, backward = partitioner.create_partitioned_graph, ScanAutogradImpl.call_backward
    cut, traced = HopJointGraph.partition, joint_tracing.materialize_as_graph

    def traced_silently(fn: Callable[..., object], *args: Any, **named: Any) -> fx.GraphModule:
        if not isinstance(getattr(fn, "__wrapped__", None), fx.GraphModule):
            return traced(fn, *args, **named)
        return traced(torch.no_grad()(fn), *args, **named)

    def called(self: ScanAutogradImpl, *gradients: object) -> object:
        dense = torch.contiguous_format  # as steps pass them on
        owned = (g.clone(memory_format=dense) if isinstance(g, Tensor) else g for g in gradients)
        return backward(self, *owned)

    def created(*args: Any, **named: Any) -> HopPartitionedGraph:
        made = plain(*args, **named)
        _sizes_of_tensors(made)
        _own_results(made.bw_gm)
        return made

    def partition(self: HopJointGraph, *args: Any, **named: Any) -> HopPartitionedGraph:
        for n in self.joint_gm.graph.nodes:
            n.meta.pop("recompute", None)  # a checkpoint around the loop is not one in its steps
        if computes_again():
            _compute_again(self.joint_gm)
        keep_draws_apart(self.joint_gm)
        return cut(self, *args, **named)

    logger.setLevel(max(level, logging.INFO))
    HopJointGraph.partition = partition
    joint_tracing.materialize_as_graph = traced_silently
    partitioner.create_partitioned_graph = staticmethod(created)
    ScanAutogradImpl.call_backward = called
    try:
        yield
    finally:
        partitioner.create_partitioned_graph = staticmethod(plain)
        ScanAutogradImpl.call_backward = backward
        HopJointGraph.partition = cut
        joint_tracing.materialize_as_graph = traced
        logger.setLevel(level)


# Torch lets other ops with functions pass through checkpoints: their nodes are marked there as all others are.
for mode in (_CachingTorchDispatchMode, _CachedTorchDispatchMode):
    if mode not in scan_op.python_key_table:
        redirect_to_mode(scan_op, mode)


def _compute_again(joint: fx.GraphModule) -> None:
    """Mark what the forward pass makes as what the backward pass makes again; but for random numbers, which it would
    draw anew."""
    late: set[fx.Node] = set()
    for n in joint.graph.nodes:
        tangent = n.op == "placeholder" and n.name.startswith("tangents")
        if tangent or any(a in late for a in n.all_input_nodes):
            late.add(n)
        elif n.op == "call_function":
            of_draws = n.target is operator.getitem and any(may_draw(a.target) for a in n.all_input_nodes)
            drawn = may_draw(n.target) or of_draws
            n.meta["recompute"] = CheckpointPolicy.MUST_SAVE if drawn else CheckpointPolicy.MUST_RECOMPUTE


def _sizes_of_tensors(made: HopPartitionedGraph) -> None:
    """Sizes that the forward pass would save in each step are read from tensors that the backward pass has."""
    output = made.fw_gm.graph.output_node()
    results, given = list(output.args[0]), made.bw_gm.graph.find_nodes(op="placeholder")  # pyright: ignore[reportArgumentType]
    places = {
        n.node.expr: (p, d)
        for p in given
        if isinstance(p.meta.get("val"), Tensor)
        for d, n in enumerate(p.meta["val"].shape)
        if isinstance(n, torch.SymInt)
    }
    first = next(n for n in made.bw_gm.graph.nodes if n.op != "placeholder")
    for k in reversed(range(made.n_intermediates)):
        held, value = given[k], given[k].meta.get("val")
        place = places.get(value.node.expr) if isinstance(value, torch.SymInt) else None
        if place is None:
            continue
        with made.bw_gm.graph.inserting_before(first):
            read = made.bw_gm.graph.call_function(torch.ops.aten.sym_size.int, place)
        read.meta = dict(held.meta)
        held.replace_all_uses_with(read)
        made.bw_gm.graph.erase_node(held)
        results.pop(made.n_fw_outputs + k)
        made.n_intermediates -= 1
    output.args = (tuple(results),)
    made.fw_gm.recompile()
    made.bw_gm.recompile()


def _own_results(gm: fx.GraphModule) -> None:
    """Results that are inputs, or other results, or lie in another order than their own, as copies."""
    output = gm.graph.output_node()
    seen: set[fx.Node] = set()
    with gm.graph.inserting_before(output):

        def own(n: fx.Node) -> fx.Node:
            shared, value = n.op == "placeholder" or n in seen, n.meta.get("val")
            seen.add(n)
            if not isinstance(value, Tensor) or (not shared and value.is_contiguous()):
                return n
            copy = gm.graph.call_function(
                torch.ops.aten.clone.default, (n,), {"memory_format": torch.contiguous_format}
            )
            copy.meta = {**n.meta, "val": value.new_empty(value.shape)}
            return copy

        output.args = (fx.map_arg(output.args[0], own),)
    gm.recompile()
