"""Reduce dependency, classes, broadcast, size and parallel degree, from access maps alone."""

from __future__ import annotations

import pytest
import torch
from tests.analysis.dependence.workloads import WORKLOADS, h2o, inputs
from tests.support.normal_graph import capture, made_by, results
from torch import Tensor
from torch.nn import functional as F

from tilewright.analysis.dependence.properties import (
    NO_CLASS,
    Dependency,
    Properties,
    classes_of,
    parallel_classes,
    parallelism,
    properties,
    size,
    unread,
)
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.sizes import dims

B, R, N = Dependency.BATCH, Dependency.REUSE, Dependency.NONPARA


def of(graph: Graph) -> Properties:
    return properties(graph.ops)


def tensors(graph: Graph) -> list[Value]:
    return [v for v in graph.inputs if isinstance(v, Value)]


def cone(graph: Graph, *outputs: Value, given: tuple[Value, ...] = ()) -> list[Op]:
    """The ops that lead to `outputs` from the inputs and the `given` values, in order."""
    wanted, kept = set(outputs), []
    for op in reversed(graph.ops):
        if wanted & set(op.outputs) - set(given):
            kept.append(op)
            wanted |= set(op.inputs)
    return kept[::-1]


def degree(ops: list[Op], *outputs: Value, tile: int = 128) -> int | None:
    return dims.static(parallelism(ops, outputs, tile))


# --- figure 5: single ops


def test_a_reduction_leaves_its_dim_to_one_unit():
    graph = capture(lambda x: x.sum(-1, keepdim=True), [torch.zeros(8, 64)])
    p, (x,), (y,) = of(graph), tensors(graph), results(graph)
    assert p.dependency[x] == (B, N) and p.dependency[y] == (B, N)
    assert p.classes[x][0] == p.classes[y][0] and p.classes[y][1] == NO_CLASS


def test_a_batched_product_reuses_rows_and_columns():
    graph = capture(torch.bmm, [torch.zeros(4, 8, 16), torch.zeros(4, 16, 32)])
    p, (x, y), (z,) = of(graph), tensors(graph), results(graph)
    assert p.dependency[x] == (B, R, N) and p.dependency[y] == (B, N, R) and p.dependency[z] == (B, R, R)
    batch, m, n = p.classes[z]
    assert p.classes[x][:2] == (batch, m) and p.classes[y] == (batch, p.classes[x][2], n)
    assert len({batch, m, n, p.classes[x][2]}) == 4


def test_a_broadcast_operand_makes_the_other_reused():
    graph = capture(lambda x, y: x + y, [torch.zeros(8, 64), torch.zeros(64)])
    p, (x, y), (z,) = of(graph), tensors(graph), results(graph)
    assert p.dependency[x] == p.dependency[z] == (R, B) and p.dependency[y] == (B,)
    equal = capture(lambda x, y: x * y, [torch.zeros(8, 64), torch.zeros(8, 64)])
    assert of(equal).dependency[results(equal)[0]] == (B, B)


# --- figure 8: several ops


def test_a_product_and_a_reduction_of_it_join_what_they_say():
    """(a): the product calls its columns REUSE, the reduction over them NONPARA; the value between is NONPARA."""
    graph = capture(lambda x, y: (x @ y).sum(-1), [torch.zeros(64, 16), torch.zeros(16, 32)])
    p = of(graph)
    assert p.dependency[made_by(graph, "matmul").output] == (R, N)


def test_what_a_reader_needs_whole_goes_back_to_the_operand():
    """(b): so is the right operand's dim, by propagation against the data flow, through any view."""
    graph = capture(lambda x, y: (x @ y.T).relu().sum(-1), [torch.zeros(64, 16), torch.zeros(32, 16)])
    p, (x, y) = of(graph), tensors(graph)
    assert p.dependency[y] == (N, N) and p.dependency[x] == (R, N)
    assert p.classes[y][0] == p.classes[made_by(graph, "matmul").output][1]
    alone = capture(lambda x, y: (x @ y.T).relu(), [torch.zeros(64, 16), torch.zeros(32, 16)])
    assert of(alone).dependency[tensors(alone)[1]] == (R, N)


# --- attention with statistics over queries


def parts_of_h2o(sequence: int = 4096) -> tuple[Graph, Value, Value, Value, Value]:
    graph = capture(h2o, inputs("h2o", 32, sequence, sequence, 128))
    out, column = results(graph)
    (total,) = [op.output for op in graph.ops if op.name == "sum" and op.output is not column]
    return graph, out, column, total, made_by(graph, "max").output


def test_probabilities_that_rows_and_columns_reduce_cannot_be_cut():
    graph, *_ = parts_of_h2o()
    weights = made_by(graph, "softmax").output
    assert of(graph).dependency[weights] == (N, B, N, N)


def test_degrees_of_parallelism():
    """The whole graph: heads. The row kernel: heads and query tiles. The column kernel, which is given the row
    statistics: heads and key tiles."""
    graph, out, column, total, top = parts_of_h2o()
    assert degree(list(graph.ops), out, column) == 32
    assert degree(cone(graph, out), out) == 32 * 32
    assert degree(cone(graph, out, total, top), out, total, top) == 32 * 32
    rest = cone(graph, column, given=(total, top))
    assert not {"max"} & {op.name for op in rest} and degree(rest, column) == 32 * 32
    assert degree(cone(graph, total), total, tile=64) == 32 * 64


@pytest.mark.parametrize("name", WORKLOADS)
def test_only_softmax_alone_is_one_kernel(name: str):
    graph = capture(WORKLOADS[name], inputs(name, 32, 4096, 4096, 128))
    one_kernel = name in ("vanilla", "gemma2")
    assert degree(list(graph.ops), *results(graph)) == (1024 if one_kernel else 32)


def test_symbolic_sizes_give_a_symbolic_degree():
    ins = inputs("vanilla", 4, 64, 64, 16)
    graph = capture(WORKLOADS["vanilla"], ins, [{2: "s"}, {2: "s"}, {2: "s"}])
    found = parallelism(graph.ops, results(graph), 16)
    (s,) = dims.symbols_of(found)
    assert dims.evaluate(found, {repr(s): 100}) == 4 * 7


# --- views


def test_views_share_their_classes():
    def run(x: Tensor) -> Tensor:
        return x.permute(2, 0, 1).unsqueeze(1).flip(0).exp()

    graph = capture(run, [torch.zeros(4, 8, 16)])
    p, (x,), (y,) = of(graph), tensors(graph), results(graph)
    a, b, c = p.classes[x]
    assert p.classes[y][1:] == (NO_CLASS, a, b) and p.classes[y][0] != c


def test_a_split_dim_is_two_loops_and_only_one_of_them_is_reduced():
    """Heads inside a projection's result: the product sums over the depth of a head, not over heads."""

    def run(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w).reshape(64, 8, 16).square().sum(-1)

    graph = capture(run, [torch.zeros(64, 32), torch.zeros(128, 32)])
    p, (_, w), (y,) = of(graph), tensors(graph), results(graph)
    heads, depth = p.structure.digits[w][0]
    assert p.classes[y][1] == heads and p.structure.kinds[depth] is N and p.structure.kinds[heads] is R
    assert dims.static(p.structure.extents[heads]) == 8 and p.dependency[w][0] is N
    assert degree(list(graph.ops), y, tile=32) == 2


def test_a_merged_dim_is_its_parts():
    graph = capture(lambda x: x.reshape(-1, 16).softmax(-1).reshape(4, 8, 16), [torch.zeros(4, 8, 16)])
    p, (x,), (y,) = of(graph), tensors(graph), results(graph)
    assert p.classes[x] == p.classes[y] and p.dependency[y] == (B, B, N)
    across = capture(lambda x: x.reshape(4, -1).softmax(-1), [torch.zeros(4, 8, 16)])
    assert of(across).dependency[tensors(across)[0]] == (B, N, N)


def test_packed_projections_keep_their_heads():
    """Queries and keys are parts of one product's columns: heads stay parallel, their depth is reduced."""

    def run(x: Tensor, w: Tensor) -> Tensor:
        q, k = F.linear(x, w).reshape(32, 2, 4, 8).unbind(1)
        return (q * k).sum(-1)

    graph = capture(run, [torch.zeros(32, 16), torch.zeros(64, 16)])
    p, (_, w), (y,) = of(graph), tensors(graph), results(graph)
    part, heads, depth = p.structure.digits[w][0]
    assert p.structure.digits[y] == ((p.classes[y][0],), (heads,)) and part not in p.classes[y]
    assert p.structure.kinds[heads] is R and p.structure.kinds[depth] is N
    unaligned = capture(lambda x: x.exp()[:, 3:19].sum(-1), [torch.zeros(8, 32)])
    assert of(unaligned).dependency[made_by(unaligned, "exp").output] == (B, N)


def test_grouped_heads_share_keys():
    def run(q: Tensor, k: Tensor) -> Tensor:
        return q @ k.repeat_interleave(4, 1).transpose(-1, -2)

    graph = capture(run, [torch.zeros(1, 8, 32, 16), torch.zeros(1, 2, 32, 16)])
    p, (q, k), (s,) = of(graph), tensors(graph), results(graph)
    group, member = p.structure.digits[s][1]
    assert p.structure.digits[q][1] == (group, member) and p.structure.digits[k][1] == (group,)
    assert p.structure.kinds[member] is R and p.dependency[k][1] is B


def test_windows_overlap_and_indices_from_data_need_everything():
    pooled = capture(lambda x: F.avg_pool1d(x.exp(), 5, 1, 2), [torch.zeros(2, 4, 64)])
    assert of(pooled).dependency[made_by(pooled, "exp").output] == (B, B, R)
    taken = capture(lambda x, i: x.exp()[i], [torch.zeros(32, 8), torch.zeros(4, dtype=torch.int64)])
    p, (x, i) = of(taken), tensors(taken)
    assert p.dependency[x][0] is N and p.dependency[i] == (B,)


# --- meeting is a preference


def test_one_tensor_read_along_two_axes_stays_two_loops():
    """Self-attention on one tensor: keys are reduced, queries are not."""
    graph = capture(lambda x: torch.softmax(x @ x.T, -1) @ x, [torch.zeros(256, 64)])
    p, (y,) = of(graph), results(graph)
    assert p.dependency[made_by(graph, "softmax").output] == (R, N)
    assert degree(list(graph.ops), y, tile=64) == 4


def test_a_value_made_inside_is_made_twice():
    def run(x: Tensor) -> Tensor:
        z = x / x.square().sum(-1, keepdim=True).sqrt()
        return z @ z.T

    graph = capture(run, [torch.zeros(256, 64)])
    p, (y,) = of(graph), results(graph)
    rows, columns = p.classes[y]
    assert rows != columns and p.dependency[y] == (R, R)
    assert degree(list(graph.ops), y, tile=64) == 16


def test_rows_and_columns_of_one_input_have_no_common_loop():
    graph = capture(lambda x: (x.sum(0), x.sum(1)), [torch.zeros(64, 64)])
    p, (x,) = of(graph), tensors(graph)
    assert p.dependency[x] == (N, N) and degree(list(graph.ops), *results(graph)) == 1
    assert parallel_classes(graph.ops, results(graph), classes_of(graph.ops)) == ()


def test_prefixes_are_in_order():
    graph = capture(lambda x: torch.cumsum(x, 1), [torch.zeros(8, 64)])
    assert of(graph).dependency[results(graph)[0]] == (B, N)


# --- broadcast and size


def test_unread_axes_and_sizes():
    graph = capture(lambda x, y: x.half() + y, [torch.zeros(8, 64), torch.zeros(64, dtype=torch.half)])
    (add,) = [op for op in graph.ops if len(op.inputs) == 2]
    assert add.expr is not None
    by_operand = {r.value: axes for r, axes in unread(add).items()}
    assert by_operand == {0: (), 1: (add.expr.axes[0],)}
    halves = size(results(graph)[0])
    assert (dims.static(halves.elements), dims.static(halves.bytes)) == (512, 1024)
