"""What a graph of a GPU makes on the CPU is made on the GPU, on tensors that are only described."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map_only

from tilewright.capture.aliasing.memory import storage_of
from tilewright.capture.fx import from_fx
from tilewright.capture.opaque import Runner
from tilewright.capture.placement.device import graph_device, tensors
from tilewright.capture.placement.moved import around_host_results, move, moved
from tilewright.errors import UnsupportedError

aten = torch.ops.aten
HOST, OTHER = torch.device("cpu"), torch.device("cuda:0")


def traced(function: Callable[..., object], *devices: str) -> fx.GraphModule:
    """The graph of a function of tensors of three elements."""
    with FakeTensorMode():
        given = [torch.empty(3, device=device) for device in devices]
    return make_fx(function, tracing_mode="fake")(*given)


def held(gm: fx.GraphModule) -> list[str]:
    """Nodes whose results lie on the CPU."""
    return [n.name for n in gm.graph.nodes if any(t.device.type == "cpu" for t in tensors(n))]


def there(t: Tensor) -> Tensor:
    return aten._to_copy(t, device=OTHER)


def table(x: Tensor) -> Tensor:
    """Indices and a mask, as models make them."""
    i = torch.arange(3)
    return aten.index(x, [i]) + aten.where(there(i[:, None] >= i), x, torch.full((), -1.0)).sum(0)


def constant(x: Tensor) -> Tensor:
    return x * there(torch.tensor([1.0, 2.0, 3.0]) + 1)


def strided(x: Tensor) -> Tensor:
    """A view of what moves keeps its strides."""
    return aten.mm(x.expand(3, 3), there(torch.ones(3, 3).t().cumsum(0)))


def by_way(x: Tensor) -> Tensor:
    """Over to the CPU and back."""
    return there(aten._to_copy(x, device=torch.device("cpu")) * 2) + x


def parts(x: Tensor) -> Tensor:
    """Lists of views move with what they show."""
    first, second = torch.arange(6).chunk(2)
    return x * there(first) + there(second)


def by_place(x: Tensor) -> Tensor:
    """A view that names its place in the storage of another view, and lies outside of that."""
    return x * there(torch.arange(6).narrow(0, 3, 3).as_strided((3,), (1,), 0))


@pytest.mark.parametrize("function", [table, constant, strided, by_way, parts, by_place])
def test_what_is_made_on_the_cpu_moves(function: Callable[..., object]) -> None:
    gm = traced(function, "cuda")
    before, code = held(gm), gm.code
    with pytest.raises(UnsupportedError):
        graph_device(gm)
    made = moved(gm)
    assert before and {n for n in held(made) if not n.startswith("_tensor_constant")} == set()
    assert graph_device(made) == "cuda:0" and from_fx(made).ops
    assert (gm.code, held(gm)) == (code, before)  # the caller's graph is as it was
    after = {n.name: n for n in made.graph.nodes}
    for node in gm.graph.nodes:  # described as before, but for the device
        for a, b in zip(tensors(node), tensors(after[node.name]), strict=True):
            assert (a.stride(), a.storage_offset()) == (b.stride(), b.storage_offset())
    for node in made.graph.nodes:  # and as torch describes it there
        if node.op == "call_function":
            args = tree_map_only(fx.Node, lambda n: n.meta["val"], node.args)
            described = list(tensors(node))
            with described[0].fake_mode:  # pyright: ignore[reportAttributeAccessIssue]
                promised = tree_leaves(node.target(*args, **node.kwargs))
            for a, b in zip(promised, described, strict=True):
                assert (a.device, a.stride()) == (b.device, b.stride())
    for node in made.graph.find_nodes(op="call_function", target=aten.as_strided.default):
        assert storage_of(node) == storage_of(node.args[0]) == storage_of(after["arange"])
    move(gm)
    assert gm.code == made.code


def test_sizes_may_be_read_of_what_moves() -> None:
    """As of a table in parts, whose sizes are not known."""
    shapes, source = ShapeEnv(), ConstantSource("n")
    symbol = shapes.create_symbol(7, source, dynamic_dim=DimDynamic.DYNAMIC)
    mode = FakeTensorMode(shape_env=shapes)
    with mode:
        x = torch.empty(shapes.create_symintnode(symbol, hint=7, source=source), device="cuda")

    def halves(x: Tensor) -> Tensor:
        first, second = torch.arange(2 * x.shape[0]).chunk(2)
        return x * there(first) + there(second)

    with mode:
        gm = make_fx(halves, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
    assert any("sym_size" in str(n.target) and n.args[0].name.startswith("arange") for n in gm.graph.nodes)
    assert held(gm) and not held(moved(gm))


@pytest.mark.parametrize(
    ("function", "devices"),
    [
        (lambda x: (x, torch.arange(3) + 1), "cuda"),
        (lambda x, y: x * there(y + torch.arange(3)), "cuda cpu"),
        (lambda x: x + there(torch.rand(3) * 2), "cuda"),
        (lambda x: x + there(aten.mm(torch.ones(3, 3).long(), torch.ones(3, 3).long())), "cuda"),
        (lambda x: x + there(torch.zeros(3).fill_(2.0)), "cuda"),
        (lambda x: x + there(torch.linalg.eigh(torch.ones(3, 3))[1][0]), "cuda"),
        (lambda x, y: (x + there(torch.ones(3)), y * 2), "cuda:0 cuda:1"),
    ],
    ids=["a result", "an input", "random", "integer product", "written", "several results", "two devices"],
)
def test_what_lies_on_the_cpu_stays(function: Callable[..., object], devices: str) -> None:
    gm = traced(function, *devices.split())
    before = held(gm)
    assert before and held(moved(gm)) == before


@pytest.mark.parametrize(
    ("function", "brought"),
    [
        (lambda x: (x + 1, aten._to_copy(x.sum(0), device=HOST)), [1]),
        (lambda x: (torch.arange(3) * 2, x + there(torch.ones(3))), [0]),
        (lambda x: (torch.rand(3), x), []),
        (lambda x: [x, *torch.arange(4).split(2)], []),
    ],
    ids=["brought", "made", "random", "shared"],
)
def test_what_goes_out_on_the_cpu_is_brought_there(
    function: Callable[..., object], brought: list[int]
) -> None:
    gm = traced(function, "cuda")
    seen: list[fx.GraphModule] = []

    def build(gm: fx.GraphModule, kind: str, frozen: Mapping[str, Tensor]) -> Runner:
        seen.append(gm)
        return lambda args: [FakeResult(k) for k in range(2)]  # type: ignore[misc]

    runner = around_host_results(build)(gm, "inference", {})
    (built,) = seen
    if brought:
        assert graph_device(built) == "cuda:0" and [r.on_host for r in runner([])] == [  # type: ignore[attr-defined]
            k in brought for k in range(2)
        ]
    else:
        assert built is gm


class FakeResult(Tensor):
    """Notes that it was brought to the CPU."""

    on_host: bool

    def __new__(cls, value: int) -> FakeResult:
        made = torch.tensor(value).as_subclass(cls)
        made.on_host = False
        return made

    def to(self, *_: object) -> FakeResult:
        """A copy of it there."""
        made = FakeResult(int(self.item()))
        made.on_host = True
        return made


def test_a_graph_of_the_cpu_is_left_alone() -> None:
    gm = traced(lambda x: x + torch.arange(3), "cpu")
    assert moved(gm) is gm
