"""Host operators mean the same as the tensor operators of the same name."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, StatelessSymbolicContext

from tilewright.capture.onnx import ops
from tilewright.capture.onnx.registry import OpDef, lookup, lookup_host
from tilewright.capture.onnx.values import host as host_module
from tilewright.capture.onnx.values.ratio import Ratio
from tilewright.capture.onnx.values.run import Host, as_host, as_tensor, host, scalar, to_int

CPU = torch.device("cpu")
assert ops and host_module


def entry(name: str, opset: int = 20) -> OpDef:
    """The tensor operator."""
    found = lookup("", name, opset)
    assert found is not None
    return found


def hosted(x: Tensor) -> Host:
    """A tensor's values on the host."""
    result = as_host(x)
    assert isinstance(result, Host)
    return result


def compare(name: str, *xs: Tensor, **attributes: object) -> None:
    """Both meanings of one operator; the host may decline."""
    on_host = lookup_host("", name)
    assert on_host is not None
    op = entry(name)
    got = on_host(*[hosted(x) for x in xs], **attributes)
    if got is None:
        return
    args = [hosted(x) if i in op.host else x for i, x in enumerate(xs)]
    extra = {"device": CPU} if "device" in op.names else {}
    want = op.function(*args, **attributes, **extra)
    for w, g in zip(
        want if isinstance(want, tuple) else (want,), got if isinstance(got, tuple) else (got,), strict=True
    ):
        g = as_tensor(g, CPU)
        w = as_tensor(w, CPU)
        assert isinstance(w, Tensor) and isinstance(g, Tensor)
        assert w.dtype == g.dtype and w.shape == g.shape, (name, w, g)
        assert torch.equal(w, g), (name, xs, attributes, w, g)


def ints(generator: random.Random, *shape: int, low: int = -9, high: int = 9, zero: bool = True) -> Tensor:
    """Random integers, without zeros if asked."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    values = [generator.choice([v for v in range(low, high + 1) if zero or v]) for _ in range(count)]
    return torch.tensor(values, dtype=torch.int64).reshape(shape)


@pytest.mark.parametrize("seed", range(20))
def test_arithmetic(seed: int) -> None:
    r = random.Random(seed)
    shapes = r.choice([((3,), (3,)), ((3,), (1,)), ((), (4,)), ((2, 1), (3,)), ((), ())])
    a, b = (ints(r, *s) for s in shapes)
    divisor = ints(r, *shapes[1], zero=False)
    for name in (
        "Add",
        "Sub",
        "Mul",
        "Equal",
        "Less",
        "LessOrEqual",
        "Greater",
        "GreaterOrEqual",
        "Max",
        "Min",
    ):
        compare(name, a, b)
        compare(name, a.float() / 4, b.float() / 4)
    for name in ("Div", "Mod"):
        compare(name, a, divisor)
    compare("Div", a.float(), divisor.float())
    for name in ("And", "Or", "Xor"):
        compare(name, a > 0, b > 0)
    compare("Pow", a, b.abs())
    compare("Where", torch.broadcast_tensors(a > b, a)[0], a, b)
    compare("Sum", a, b, a)


@pytest.mark.parametrize("seed", range(20))
def test_unary_and_casts(seed: int) -> None:
    r = random.Random(seed)
    x = ints(r, 5)
    compare("Neg", x)
    compare("Abs", x)
    compare("Not", x > 0)
    compare("Sqrt", x.abs().float())
    compare("Size", x)
    for name in ("Floor", "Ceil"):
        compare(name, x.float() / 4)
    for code in (1, 6, 7, 9, 11):
        compare("Cast", x, to=code)
        compare("Cast", x.float() / 4, to=code)
    compare("CumSum", x, torch.tensor(0))
    for name in ("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin"):
        for keep in (0, 1):
            compare(name, x, torch.tensor([0]), keepdims=keep)


@pytest.mark.parametrize("seed", range(30))
def test_movement(seed: int) -> None:
    r = random.Random(seed)
    rank = r.randint(1, 3)
    dims = [r.randint(1, 4) for _ in range(rank)]
    x = ints(r, *dims)
    axis = r.randrange(-rank, rank)
    n = dims[axis]
    index = torch.tensor([r.randrange(-n, n) for _ in range(4)]).reshape(r.choice([(4,), (2, 2), (1, 4)]))
    compare("Gather", x, index, axis=axis)
    compare("Gather", x, index.reshape(-1)[0], axis=axis)
    order = list(range(rank))
    r.shuffle(order)
    compare("Transpose", x, perm=order)
    compare("Transpose", x)
    compare("Concat", x, x, axis=axis)
    compare("Shape", x)
    compare("Shape", x, start=r.randint(-3, 3), end=r.randint(-3, 3))
    compare("Reshape", x, torch.tensor([-1]))
    compare("Reshape", x, torch.tensor([0, -1]))
    compare("Flatten", x, axis=r.randint(0, rank))
    compare("Unsqueeze", x, torch.tensor([0, rank + 1]))
    compare("Squeeze", x.unsqueeze(0), torch.tensor([0]))
    compare("Squeeze", x)
    compare("Tile", x, torch.tensor([r.randint(1, 2) for _ in range(rank)]))
    compare("Expand", x, torch.tensor([2, *dims]))
    compare("NonZero", x)
    starts = [r.randint(-6, 6), r.randint(-6, 6)]
    for step in (1, 2, -1, -3):
        wide = ints(r, 5, 4)
        ends = [r.randint(-7, 7), r.choice([2**62, -(2**62)])]
        vectors = [torch.tensor(v) for v in (starts, ends, [0, 1], [step, step])]
        compare("Slice", wide, *vectors)


def test_ranges_and_fills() -> None:
    for first, last, step in [(0, 5, 1), (5, 0, -2), (3, 3, 1), (0, -4, 1), (1, 8, 3)]:
        compare("Range", torch.tensor(first), torch.tensor(last), torch.tensor(step))
    compare("ConstantOfShape", torch.tensor([2, 3]), value=scalar(7))
    compare("ConstantOfShape", torch.tensor([0, 3]))
    compare("ScatterND", torch.arange(5), torch.tensor([[1], [3]]), torch.tensor([9, 8]))


def symbol(hint: int) -> torch.SymInt:
    """A symbolic size."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(
        dynamic_sizes=[torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC]
    )
    size = mode.from_tensor(torch.empty(hint), symbolic_context=context).shape[0]
    assert isinstance(size, torch.SymInt)
    return size


STEPS: list[Callable[[object], object]] = [
    lambda v: v * 2.0,  # type: ignore[operator]
    lambda v: v * 0.5,  # type: ignore[operator]
    lambda v: v / 4.0,  # type: ignore[operator]
    lambda v: v + 1.5,  # type: ignore[operator]
    lambda v: v - 0.25,  # type: ignore[operator]
    lambda v: 3.0 - v,  # type: ignore[operator]
    lambda v: -v,  # type: ignore[operator]
    lambda v: v / -2.0,  # type: ignore[operator]
]


@pytest.mark.parametrize("seed", range(40))
def test_fractions_are_exact(seed: int) -> None:
    """Random arithmetic on a fraction of a size equals the same on a float."""
    r = random.Random(seed)
    n = r.randint(2, 50)
    exact: object = Ratio(symbol(n), 1)
    plain: object = float(n)
    for _ in range(r.randint(1, 5)):
        step = r.choice(STEPS)
        exact, plain = step(exact), step(plain)
    assert isinstance(exact, Ratio) and isinstance(plain, float)
    assert float(exact.real()) == plain
    assert int(exact.floor()) == torch.tensor(plain, dtype=torch.float64).floor().item()
    assert int(exact.ceil()) == torch.tensor(plain, dtype=torch.float64).ceil().item()
    assert int(to_int(exact)) == int(plain)
    for bound in (0.0, 3.25, -7.5):
        assert bool(exact < bound) == (plain < bound) and bool(exact >= bound) == (plain >= bound)


def test_symbolic_sizes_stay_symbols() -> None:
    """floor(n * 0.5) is n // 2, and shape arithmetic adds no guard."""
    n = symbol(10)
    half = lookup_host("", "Mul")
    floor = lookup_host("", "Floor")
    cast = lookup_host("", "Cast")
    assert half and floor and cast
    as_float = cast(host([n]), to=1)
    result = cast(floor(half(as_float, host([0.5], torch.float32))), to=7)
    assert isinstance(result, Host)
    (value,) = result.values
    assert isinstance(value, torch.SymInt) and str(value.node.expr) == f"({n.node.expr}//2)"
    assert not n.node.shape_env.guards


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rounding_leaves_nothing_in_a_trace(dtype: torch.dtype) -> None:
    """A tensor made on the way would be a node, and each node takes longer the more there are."""
    multiply = lookup_host("", "Mul")
    assert multiply is not None
    factors = Host((1.1, 1e39, -1e-40), (3,), dtype)
    seen: list[object] = []

    def run(x: Tensor) -> Tensor:
        seen.append(multiply(factors, Host((0.7,), (1,), dtype)))
        return x + 1

    traced = make_fx(run, tracing_mode="fake")(torch.ones(2))
    assert [n.target for n in traced.graph.nodes if n.op == "call_function"] == [torch.ops.aten.add.Tensor]
    rounded = torch.tensor([v * 0.7 for v in factors.values], dtype=torch.float64).to(dtype)
    (product,) = seen
    assert isinstance(product, Host) and product.values == tuple(rounded.tolist())
