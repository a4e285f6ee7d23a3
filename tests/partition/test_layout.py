"""Where kernels store images with their channels innermost."""

from __future__ import annotations

import torch
from tests.support.library_calls import captured, fast
from torch import Tensor, nn
from torch.nn import functional as F

from tilewright.ir.graph import Graph, Layout, Value
from tilewright.ir.sizes import dims
from tilewright.library.offers.offer import channels_last
from tilewright.partition.layout import kernel_layouts


def chosen(graph: Graph) -> dict[str, bool]:
    """By name of the op: whether its result has its channels innermost."""
    known: dict[Value, Layout] = dict(graph.layouts)
    for op in graph.ops:
        for v, strides in zip(op.outputs, op.call.strides if op.call is not None else (), strict=False):
            known[v] = Layout(strides)
    found = kernel_layouts(graph, known)
    for v, layout in found.items():
        assert layout.strides == channels_last(v.shape)
    return {op.name: op.output in found for op in graph.ops if op.expr is not None}


class Net(nn.Module):
    """A convolution, then a function of it."""

    def __init__(self, after: object, before: object = None) -> None:
        super().__init__()
        self.layer, self.after, self.before = nn.Conv2d(3, 32, 3), after, before

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(x if self.before is None else self.before(x)))  # type: ignore[operator]


def of(after: object, before: object = None, shape: tuple[int, ...] = (2, 3, 12, 10)) -> dict[str, bool]:
    x = torch.randn(shape)
    return chosen(fast(captured(Net(after, before).eval(), [x])))


def test_elementwise_ops_pools_and_sums_follow_the_convolution() -> None:
    found = of(lambda y: F.max_pool2d(F.relu(y), 2).relu().sum((2, 3)))
    assert found["relu"] and found["max_pool"]
    assert not found["sum"]  # rank 2


def test_what_a_convolution_reads_is_stored_as_it_wants_it() -> None:
    assert of(lambda y: y.sum((1, 2, 3)), before=lambda x: x * 2 + 1)["add"]


def test_outputs_keep_the_strides_of_the_program() -> None:
    assert not of(lambda y: torch.relu(y))["relu"]


def test_a_broadcast_operand_has_no_say() -> None:
    found = of(lambda y: (y * torch.sigmoid(y.mean((2, 3), keepdim=True))).exp().sum((2, 3)))
    assert found["mul"] and found["exp"]


def test_what_is_made_of_a_broadcast_alone_has_no_say() -> None:
    """The gradient of a mean over places, beside one that a convolution made."""

    def spread(y: Tensor) -> Tensor:
        return y.mean((2, 3))[:, :, None, None].expand(y.shape) / 7 + 1

    found = of(lambda y: (torch.sub(spread(y), y) * 3).exp().sum((2, 3)))
    assert found["sub"] and found["mul"] and found["exp"]
    assert found["add"], "it lies as its reader"
    assert not of(lambda y: spread(y).exp().sum((2, 3)))["exp"]


def test_without_convolutions_everything_is_dense() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.max_pool2d(torch.relu(x), 2).sum((2, 3))

    assert not any(chosen(fast(captured(Plain(), [torch.randn(2, 8, 12, 10)]))).values())


def test_strides_of_channels_last() -> None:
    shape = tuple(dims.integer(n) for n in (2, 3, 4, 5))
    want = torch.empty(2, 3, 4, 5, memory_format=torch.channels_last).stride()
    assert tuple(dims.static(s) for s in channels_last(shape)) == want


class Gram(nn.Module):
    """The products of images with one another. Strides cannot say that channels lie flat: there is a copy, and the
    product sees it in two ways."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.chunk(2, 1)[0].contiguous(memory_format=torch.channels_last).flatten(1)
        return rows[None] @ rows[None].mT


def test_a_copy_for_a_product_lies_as_the_program_has_it() -> None:
    x = torch.randn(2, 8, 11, 6).contiguous(memory_format=torch.channels_last)
    graph = fast(captured(Gram(), [x]))
    found = kernel_layouts(graph, graph.layouts)
    (product,) = (op for op in graph.ops if op.call is not None)
    _, columns = product.inputs
    assert [dims.static(n) for n in columns.shape] == [1, 264, 2]
    assert [dims.static(s) for s in found[columns].strides][1:] == [1, 264]


def test_a_view_that_is_no_copy_keeps_its_memory() -> None:
    graph = fast(captured(Gram(), [torch.randn(2, 8, 11, 6)[:, :, :1, :1].contiguous()]))
    assert not any(v in kernel_layouts(graph, graph.layouts) for op in graph.ops for v in op.outputs)


def test_a_product_of_a_copy_is_as_exact_as_eager() -> None:
    """Libraries add up columns that lie far apart one by one."""
    compiled = torch.compile(Gram(), backend="tilewright", dynamic=True)
    errors = {"eager": 0.0, "ours": 0.0}
    for seed in range(20):
        x = torch.randn(2, 8, 11, 6, generator=torch.Generator().manual_seed(seed))
        x = x.contiguous(memory_format=torch.channels_last)
        exact = Gram()(x.double())
        for name, result in (("eager", Gram()(x)), ("ours", compiled(x))):
            errors[name] += (result - exact).square().sum().item()
    assert errors["ours"] <= 4 * errors["eager"]


def test_a_product_of_four_dims_is_priced_beside_a_matrix_product() -> None:
    """What its call sees in the program has two dims; the views between are gone where it is priced."""
    x, rows, weight = torch.randn(2, 4, 3, 4), torch.randn(4, 8, requires_grad=True), torch.randn(8, 3)

    def program(x: Tensor, rows: Tensor) -> Tensor:
        return (x.unsqueeze(-1) * rows).sum(-2) @ weight

    compiled = torch.compile(program, backend="tilewright")
    for seen, wanted in zip(
        torch.autograd.grad(compiled(x, rows).square().sum(), rows),
        torch.autograd.grad(program(x, rows).square().sum(), rows),
        strict=True,
    ):
        torch.testing.assert_close(seen, wanted, rtol=1e-4, atol=1e-3)
