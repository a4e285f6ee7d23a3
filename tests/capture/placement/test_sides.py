"""Graphs of which a part lives on the CPU: cut on tensors that are only described, and run with all of it there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._prims.rng_prims import run_and_save_rng_state
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._pytree import tree_map

from tilewright.capture.autograd.rng import save_states_apart
from tilewright.capture.autograd.saved import first_saved, mark_saved
from tilewright.capture.opaque import Runner
from tilewright.capture.placement.device import graph_device, tensors
from tilewright.capture.placement.moved import moved
from tilewright.capture.placement.sides import SideStage, around_sides, stages
from tilewright.errors import UnsupportedError
from tilewright.options import Options
from tilewright.pipeline.compiler import Compiled, as_captured, compile_fx

aten = torch.ops.aten
HOST, OTHER = torch.device("cpu"), torch.device("cuda:0")


def there(t: Tensor) -> Tensor:
    return aten._to_copy(t, device=OTHER)


def here(t: Tensor) -> Tensor:
    return aten._to_copy(t, device=HOST)


def is_there(t: Tensor) -> bool:
    return t.device == OTHER


def described(given: Sequence[Tensor], devices: Sequence[str]) -> list[Tensor]:
    with FakeTensorMode():
        return [torch.empty(t.shape, dtype=t.dtype, device=d) for t, d in zip(given, devices, strict=True)]


def traced(
    function: Callable[..., object], given: Sequence[Tensor], devices: Sequence[str]
) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*described(given, devices))


def brought_home(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph with all of it on the CPU, where it can run."""
    storages: dict[tuple[int, torch.dtype], Tensor] = {}

    def home(t: object) -> object:
        if isinstance(t, torch.device):
            return HOST
        if not isinstance(t, Tensor) or t.device == HOST:
            return t
        storage = t.untyped_storage()
        with t.fake_mode:  # type: ignore[attr-defined]
            size = storage.nbytes() // t.element_size()
            key = storage._cdata, t.dtype  # pyright: ignore[reportPrivateUsage]
            base = storages.setdefault(key, torch.empty(size, dtype=t.dtype))
            return torch.as_strided(base, t.shape, t.stride(), t.storage_offset())

    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        made = env[node] = graph.node_copy(node, env.__getitem__)
        made.meta = dict(node.meta)
        made.args, made.kwargs = tree_map(home, made.args), tree_map(home, dict(made.kwargs))
        if "val" in made.meta:
            made.meta["val"] = tree_map(home, made.meta["val"])
    return fx.GraphModule(gm, graph)


class Builds:
    """What is compiled and what runs as captured."""

    def __init__(self) -> None:
        self.built: list[Compiled] = []
        self.plain: list[Compiled] = []
        self.graphs: list[fx.GraphModule] = []

    def build(self, gm: fx.GraphModule, kind: str, frozen: Mapping[str, Tensor]) -> Runner:
        self.graphs.append(gm)
        home = brought_home(gm)
        self.built.append(compile_fx(home, Options(), frozen=frozen, trusted=True, kind=kind))
        return self.built[-1].executable  # type: ignore[return-value]

    def as_is(self, gm: fx.GraphModule, kind: str, frozen: Mapping[str, Tensor]) -> Runner:
        self.plain.append(as_captured(brought_home(gm), Options(), "on the CPU", frozen=frozen, kind=kind))
        return self.plain[-1].executable  # type: ignore[return-value]


def checked(
    gm: fx.GraphModule, given: Sequence[Any], sides: str, frozen: Mapping[str, Tensor] | None = None
) -> tuple[Builds, list[Any], list[Any]]:
    """Cut and run a graph: its results and what it wrote are those of the graph as it was captured."""
    cut = stages(moved(gm))
    assert "".join("h" if s.on_host else "d" for s in cut) == sides
    for stage in cut:
        if not stage.on_host:
            assert graph_device(stage.gm) == "cuda:0"
    made = Builds()
    runner = around_sides(made.build, made.as_is)(gm, "inference", frozen or {})
    names = [n.name for n in gm.graph.find_nodes(op="placeholder")]

    def fresh() -> list[Any]:
        return [a.clone() if isinstance(a, Tensor) else a for a in given]

    wanted_args, args = fresh(), fresh()
    torch.manual_seed(3)
    wanted = list(brought_home(gm)(*wanted_args))
    live = [a for a, n in zip(args, names, strict=True) if n not in (frozen or {})]
    torch.manual_seed(3)
    results = runner(list(live))
    torch.testing.assert_close(results, wanted)
    torch.testing.assert_close(args, wanted_args)
    return made, results, args


def experts(x: Tensor, w: Tensor, counts: Tensor) -> list[Tensor]:
    """What mixtures of experts do: places of rows by counts that are on the CPU."""
    ends = aten.cat([torch.zeros(1, dtype=torch.long), aten.cumsum(counts, 0)])
    return [torch.zeros(5, 3, device=OTHER) + aten.mm(x, w).relu(), ends]


def back_and_forth(x: Tensor, y: Tensor) -> list[Tensor]:
    """Each side depends on the other."""
    a = (x * 2 + 1).exp()
    b = here(a) + y
    c = there(b).sin() * a
    return [here(c + 1) * y, c, b, there(here(c) + y).exp()]


def looked_up(table: Tensor, i: Tensor, x: Tensor) -> list[Tensor]:
    return [there(aten.index(table, [i])) * x + 1]


def indexed_there(x: Tensor, i: Tensor) -> list[Tensor]:
    return [aten.index((x + 1).relu(), [i]) * 2]


X, Y, I = torch.arange(12.0).reshape(4, 3) / 9, torch.arange(12.0).reshape(4, 3), torch.tensor([2, 0, 1])  # noqa: E741


@pytest.mark.parametrize(
    ("function", "given", "devices", "sides"),
    [
        (experts, (torch.ones(5, 2), torch.ones(2, 3), I), "cuda cuda cpu", "hd"),
        (back_and_forth, (X, Y), "cuda cpu", "dhdhd"),
        (looked_up, (Y, I, torch.ones(3, 3)), "cpu cpu cuda", "hd"),
        (indexed_there, (X, I), "cuda cpu", "dhd"),
        (lambda x, y: [x.t(), x.exp(), y.t(), y + 1, x], (X, Y), "cuda cpu", "hd"),
        (lambda x, s, y: [x * s + 1, s + y], (X, torch.tensor(2.0), Y), "cuda cpu cpu", "hd"),
    ],
    ids=["experts", "back and forth", "table", "index", "views", "number"],
)
def test_what_is_cut_computes_the_same(
    function: Callable[..., object], given: Sequence[Tensor], devices: str, sides: str
) -> None:
    gm = traced(function, given, devices.split())
    code = gm.code
    with pytest.raises(UnsupportedError):
        graph_device(gm)
    made, results, _ = checked(gm, given, sides)
    assert gm.code == code
    assert all(c.coverage.generated + sum(r.count for r in c.coverage.choice) for c in made.built)
    assert {r.reason for c in made.plain for r in c.coverage.need} <= {"on the CPU"}
    del results


def test_results_share_memory_as_in_the_program() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        a = x + 1
        b = there(here(a) + y)
        size = b.sum()
        return [a, aten.view(a, [12]), b, b.t(), size, x.t(), y.t()]

    _, (a, flat, b, turned, _, xt, yt), (x, y) = checked(
        traced(function, (X, Y), ("cuda", "cpu")), (X, Y), "hdhd"
    )
    for one, other in ((a, flat), (b, turned), (x, xt), (y, yt)):
        assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert len({t.untyped_storage().data_ptr() for t in (a, b, x, y)}) == 4


def test_writes_follow_every_reader() -> None:
    """On either device; what is read of an input by a later stage is what it was."""

    def function(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        first = x + 1
        seen = there(here(first) + y)
        late = seen * x.t().t() + there(y * z)
        aten.copy_(x, first)
        aten.copy_(y, here(late))
        aten.copy_(z, y * 3)
        return [late, first]

    def swapped(x: Tensor, y: Tensor) -> list[Tensor]:
        a, b = x + there(y), y * 2
        aten.copy_(x, there(y))
        aten.copy_(y, b)
        return [a]

    with pytest.raises(UnsupportedError):  # torch's own graphs do not read what they wrote
        stages(traced(function, (X, Y, Y + 1), ("cuda", "cpu", "cpu")))
    checked(traced(swapped, (X, Y), ("cuda", "cpu")), (X, Y), "hd")

    def plain(x: Tensor, y: Tensor) -> list[Tensor]:
        first = x + 1
        late = there(here(first) + y) * x.t().t()
        back = here(late) - y
        aten.copy_(x, first)
        aten.copy_(y, back)
        return [late, first]

    gm = traced(plain, (X, Y), ("cuda", "cpu"))
    checked(gm, (X, Y), "dhdh")
    (where,) = (k for k, s in enumerate(stages(gm)) if any(n.name == "copy_" for n in s.gm.graph.nodes))
    assert where == 2  # behind the second reader, and compiled


def test_nothing_is_written_before_a_check_that_fails() -> None:
    """The check waits for the GPU, the write does not."""

    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        b = here(x + 1) + y
        aten._assert_async.msg(aten.all(aten.gt(b, 100)), "too small")
        aten.copy_(x, x * 2)
        return [there(b)]

    gm, made = traced(function, (X, Y), ("cuda", "cpu")), Builds()
    runner, x = around_sides(made.build, made.as_is)(gm, "inference", {}), X.clone()
    with pytest.raises(RuntimeError, match="too small"):
        runner([x, Y.clone()])
    assert torch.equal(x, X)
    checked(gm, (X, Y + 200), "dhd")


def test_draws_keep_their_order() -> None:
    """Those of one generator: here both sides have the same one, so that any other order gives other numbers."""

    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        a = torch.rand(4, 3, device=OTHER)
        b = torch.rand(4, 3) * y
        c = torch.rand(4, 3, device=OTHER) + x
        d = torch.rand(4, 3) + y
        return [a + c, b, d]

    checked(traced(function, (X, Y), ("cuda", "cpu")), (X, Y), "dhdh")


def symbolic(function: Callable[..., object], rows: int, devices: Sequence[str]) -> fx.GraphModule:
    """The graph of a function of a number of rows, and tensors of so many rows."""
    shapes, source = ShapeEnv(), ConstantSource("n")
    symbol = shapes.create_symbol(rows, source, dynamic_dim=DimDynamic.DYNAMIC)
    n = shapes.create_symintnode(symbol, hint=rows, source=source)
    with FakeTensorMode(shape_env=shapes):
        given = [torch.empty(n, 3, device=d) for d in devices]
        return make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(n, *given)


def test_states_of_generators_keep_their_order() -> None:
    """What the backward pass computes again draws the same numbers: the state is that behind the earlier draws, though
    these wait for the other side."""

    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        late = aten.bernoulli(here(x * 0 + 1) / 2)
        state, drawn = run_and_save_rng_state(aten.bernoulli.default, y * 0 + 0.5)
        return [there(late) + x, state, drawn]

    gm = traced(function, (X, Y), ("cuda", "cpu"))
    save_states_apart(gm, fx.GraphModule({}, fx.Graph()))
    checked(gm, (X, Y), "hdhd")


def test_sizes() -> None:
    """Of inputs, and computed ones, from one stage to the next."""

    def function(n: int, x: Tensor, y: Tensor) -> list[object]:
        a = x.expand(2, x.shape[0], 3).reshape(2 * n, 3) + 1
        b = there(aten.cumsum(here(a) + aten.cat([y, y]), 0)) * a.shape[0]
        c = aten.full([n * 3], 2.0, device=OTHER) + b.sum()
        return [b, c, n + 1, here(c)[:n] + y[:, 0], c.shape[0] - n]

    gm = symbolic(function, 7, ("cuda", "cpu"))
    for rows in (7, 4):
        made, results, _ = checked(gm, (rows, torch.ones(rows, 3), torch.ones(rows, 3)), "hdhdh")
        assert results[2] == rows + 1 and results[4] == 2 * rows
    assert len(made.built) == 2 and all(c.kernels for c in made.built)


def test_sizes_that_no_dim_tells() -> None:
    """A stage whose tensors have n * n rows is given n."""

    def function(n: int, x: Tensor, y: Tensor) -> list[object]:
        a = x.expand(n, x.shape[0], 3).reshape(n * n, 3) + 1
        return [(there(here(a) * y.sum()) * 2).exp() * 3]

    gm = symbolic(function, 7, ("cuda", "cpu"))
    made, _, _ = checked(gm, (4, torch.rand(4, 3), torch.rand(4, 3) / 9), "hdhd")
    assert [len(c.kernels) > 0 for c in made.built] == [True, True]


def test_sizes_that_data_decide() -> None:
    def function(n: int, x: Tensor, y: Tensor) -> list[object]:
        found = aten.nonzero(y[:, 0])
        picked = aten.index(x * 2, [found[:, 0]])
        return [picked + 1, aten.full([found.shape[0]], 1.0, device=OTHER) * 2]

    gm = symbolic(function, 7, ("cuda", "cpu"))
    sides = "".join("h" if s.on_host else "d" for s in stages(gm))
    y = torch.ones(5, 3)
    y[2] = 0
    checked(gm, (5, torch.rand(5, 3), y), sides)


def test_frozen_inputs_go_where_they_are_read() -> None:
    gm = traced(looked_up, (Y, I, torch.ones(3, 3)), ("cpu", "cpu", "cuda"))
    table, _, x = (n.name for n in gm.graph.find_nodes(op="placeholder"))
    given = (Y, I, torch.ones(3, 3) * 5)
    checked(gm, given, "hd", {table: given[0], x: given[2]})
    both = traced(lambda x, y: [x + 1, y * 2, x, y], (X, Y), ("cuda", "cpu"))
    names = [n.name for n in both.graph.find_nodes(op="placeholder")]
    checked(both, (X, Y), "hd", dict(zip(names, (X, Y), strict=True)))


def test_what_is_saved_is_told_from_what_is_returned() -> None:
    """In each stage: also what another stage takes is not lent."""

    def forward(x: Tensor, y: Tensor) -> list[Tensor]:
        a, c = x + 1, x.sin()
        b = here(a) + y
        d = there(b).exp()
        return [d * 2, b, d, a, c, d * 2 + c]

    gm = traced(forward, (X, Y), ("cuda", "cpu"))
    mark_saved(gm, 2)
    made, _, _ = checked(gm, (X, Y), "dhdh"[:3])
    outputs = [[n.name for n in g.graph.find_nodes(op="output")[0].args[0]] for g in made.graphs]
    assert [(names, first_saved(g)) for names, g in zip(outputs, made.graphs, strict=True)] == [
        (["add", "sin"], 2),  # sin is also taken by the last stage
        (["mul", "exp", "add_2"], 1),
    ]
    assert all(first_saved(s.gm) is None for s in stages(traced(forward, (X, Y), ("cuda", "cpu"))))


def test_numbers_of_the_cpu_are_operands() -> None:
    """Not what is written into a tensor of the GPU."""

    def function(x: Tensor, s: Tensor) -> list[Tensor]:
        a = x * s + 1
        aten.copy_(x, s)
        return [a, s + 1]

    gm = traced(function, (X, torch.tensor(2.0)), ("cuda", "cpu"))
    checked(gm, (X, torch.tensor(2.0)), "hdh")
    names = [
        [n.name for n in s.gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor)]
        for s in stages(gm)
    ]
    assert names == [[], ["mul"], []]


def test_whole_graphs_are_left_alone() -> None:
    """Those of one device or of two GPUs, and those that `moved` brings to one."""
    for function, devices in (
        (lambda x, y: [x + y], ("cuda", "cuda")),
        (lambda x, y: [x + y + torch.ones(3)], ("cpu", "cpu")),
        (lambda x, y: [x + there(torch.arange(3) * 2), y], ("cuda", "cuda")),
        (lambda x, y: [x + 1, y + 1], ("cuda:0", "cuda:1")),
        (lambda x, y: [x + 1, y + 1, torch.rand(3)], ("cuda:0", "cuda:1")),
    ):
        seen: list[fx.GraphModule] = []
        gm = traced(function, (X, Y), devices)
        keep = lambda gm, kind, frozen, seen=seen: seen.append(gm)  # noqa: E731
        around_sides(keep, None)(gm, "inference", {})  # type: ignore[arg-type]
        assert seen == [gm]


def test_nothing_to_compile_runs_as_captured() -> None:
    gm = traced(lambda x, y: [here(x) + y, x.t(), there(y)], (X, Y), ("cuda", "cpu"))
    made = Builds()
    runner = around_sides(made.build, made.as_is)(gm, "inference", {})
    assert not made.built and len(made.plain) == 1
    torch.testing.assert_close(runner([X, Y]), [X + Y, X.t(), Y])


def scattered(x: Tensor, y: Tensor) -> list[Tensor]:
    """Into places of the memory of `x`, of what the CPU makes of it."""
    return [
        aten.as_strided_scatter(x, there(here(x * 2) + y.narrow(0, 0, x.shape[0])).select(0, 0), [3], [1], 3)
    ]


@pytest.mark.parametrize(
    ("function", "sides"),
    [
        (lambda x, y: [aten.as_strided((x + 1).narrow(0, 1, 3), [2], [1], 3) + 1, y + 1], "hd"),
        (lambda x, y: scattered((x + 1).narrow(0, 1, 3), y), ""),
        (lambda x, y: scattered(x.narrow(0, 1, 3), y), ""),
        (lambda x, y: scattered(x, y), "hdhd"),
        (lambda x, y: [aten.fill_(y + 1, 2.0), x + 1], ""),
    ],
    ids=["of the same stage", "of another stage", "of a view", "of an input", "a write"],
)
def test_memory_that_cannot_be_cut(function: Callable[..., object], sides: str) -> None:
    """Addresses in the memory of what another stage makes, and writes into it: the graph is built whole, as ever."""
    gm = traced(function, (X, Y), ("cuda", "cpu"))
    made = Builds()
    if sides:
        checked(gm, (X, Y), sides)
        return
    with pytest.raises(UnsupportedError):
        stages(gm)
    seen: list[fx.GraphModule] = []
    around_sides(lambda gm, kind, frozen: seen.append(gm), made.as_is)(gm, "inference", {})  # type: ignore[arg-type, return-value, func-returns-value]
    assert seen == [gm] and not made.plain


def test_memory_of_another_stage_is_known_through_views() -> None:
    """The view itself is of the stage that knows its size."""

    def function(n: int, x: Tensor, y: Tensor) -> list[Tensor]:
        part = (x + 1).narrow(0, 1, 3)
        count = aten.nonzero(here(x.exp())[:3, 0] + y[:3, 0]).shape[0]
        return [aten.as_strided(aten.slice(part, 0, 0, count), [2], [1], 3) + 1, y + 1]

    with pytest.raises(UnsupportedError, match="an address in what another stage makes"):
        stages(moved(symbolic(function, 5, ("cuda", "cpu"))))


def test_stage_is_frozen() -> None:
    gm = traced(lambda x, y: [x + 1, y + 1], (X, Y), ("cuda", "cpu"))
    first, second = stages(gm)
    assert isinstance(first, SideStage) and first.takes == ("y_1",) and second.takes == ("x_1",)
    assert all(not is_there(t) for n in first.gm.graph.nodes for t in tensors(n))
