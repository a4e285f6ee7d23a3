"""Boolean masks of which torch makes numbers for cuDNN: they hide what they say, also from a query that sees no key."""

from __future__ import annotations

import operator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tilewright.capture.aten import attention as captured
from tilewright.capture.fx import from_fx
from tilewright.interp import run_graph
from tilewright.ir.graph import Operand
from tilewright.library.select import select
from tilewright.rewrite.normal.normalise import normalise

aten = torch.ops.aten
SHAPE, KEYS = (1, 2, 4, 8), 5


def attention(shown: float, hidden: float, *, scalar: bool, heads: int = 2) -> fx.GraphModule:
    """cuDNN's op over a bias of a mask [1, 1, queries, keys], as it is captured where there is one."""
    graph = fx.Graph()

    def node(target: object, *args: object, value: object, **kwargs: object) -> fx.Node:
        made = graph.call_function(target, args, kwargs)  # pyright: ignore[reportArgumentType]
        made.meta["val"] = value
        return made

    def given(name: str, value: Tensor) -> fx.Node:
        made = graph.placeholder(name)
        made.meta["val"] = value
        return made

    q = given("q", torch.empty(SHAPE))
    k, v = (given(name, torch.empty(1, heads, KEYS, 8)) for name in "kv")
    mask = given("mask", torch.empty(1, 1, 4, KEYS, dtype=torch.bool))
    number = torch.empty(())
    yes = node(aten.scalar_tensor.default, shown, value=number, dtype=torch.float32)
    no: object = hidden
    if not scalar:
        no = node(aten.scalar_tensor.default, hidden, value=number, dtype=torch.float32)
    where = aten.where.ScalarOther if scalar else aten.where.self
    bias = node(where, mask, yes, no, value=torch.empty(1, 1, 4, KEYS))
    found = (torch.empty(SHAPE), *[None] * 8)
    made = node(
        aten._scaled_dot_product_cudnn_attention.default, q, k, v, bias, False, value=found, scale=0.5
    )
    graph.output((node(operator.getitem, made, 0, value=torch.empty(SHAPE)),))
    return fx.GraphModule(torch.nn.Module(), graph)


def given_values() -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values, and a mask whose second row hides all keys."""
    torch.manual_seed(0)
    mask = torch.ones(1, 1, 4, KEYS, dtype=torch.bool).tril()
    mask[..., 1, :] = False
    return [torch.randn(SHAPE), torch.randn(1, 2, KEYS, 8), torch.randn(1, 2, KEYS, 8)], mask


def result(gm: fx.GraphModule, tensors: list[Tensor], mask: Tensor) -> Tensor:
    (made,) = run_graph(from_fx(gm), [np.asarray(t) for t in (*tensors, mask)])
    return torch.from_numpy(np.asarray(made, dtype=np.float32))


@pytest.fixture
def _hides_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch up to 2.11 does."""
    monkeypatch.setattr(captured, "HIDES_BY_NUMBER", True)


@pytest.mark.usefixtures("_hides_by_number")
@pytest.mark.parametrize("scalar", [False, True])
def test_a_mask_hides_what_it_says(scalar: bool) -> None:
    tensors, mask = given_values()
    found = result(attention(0.0, -65504.0, scalar=scalar), tensors, mask)
    wanted = F.scaled_dot_product_attention(*tensors, attn_mask=mask, scale=0.5)
    torch.testing.assert_close(found, wanted)
    assert not found[:, :, 1].any()


@pytest.mark.usefixtures("_hides_by_number")
@pytest.mark.parametrize(("shown", "hidden"), [(0.0, -60000.0), (0.5, -65504.0)])
def test_another_bias_is_added(shown: float, hidden: float) -> None:
    tensors, mask = given_values()
    found = result(attention(shown, hidden, scalar=False), tensors, mask)
    bias = torch.where(mask, shown, hidden)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(*tensors, attn_mask=bias, scale=0.5))
    assert found[:, :, 1].any()


def test_what_torch_would_not_add_is_the_programs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that hides keys by the least number of a half sees all keys where it hides all."""
    monkeypatch.setattr(captured, "HIDES_BY_NUMBER", False)
    tensors, mask = given_values()
    found = result(attention(0.0, -65504.0, scalar=True), tensors, mask)
    bias = torch.where(mask, 0.0, -65504.0)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(*tensors, attn_mask=bias, scale=0.5))
    assert found[:, :, 1].any()


@pytest.mark.usefixtures("_hides_by_number")
@pytest.mark.parametrize("heads", [1, 2])
def test_the_library_is_given_the_mask_that_kernels_read(heads: int) -> None:
    """Nobody needs the numbers that torch makes of it then: what made them may be gone when a call is chosen."""
    graph = from_fx(attention(0.0, -65504.0, scalar=False, heads=heads))
    (op,) = select(normalise(graph)).ops
    assert op.call is not None
    assert op.inputs == graph.inputs
    tensors, mask = given_values()
    tensors[1:] = [t[:, :heads] for t in tensors[1:]]
    args = [(*tensors, mask)[a.index] if isinstance(a, Operand) else a for a in op.call.args]
    found = op.call.function(*args, **dict(op.call.kwargs))
    whole = [tensors[0], *(t.expand(1, 2, KEYS, 8) for t in tensors[1:])]
    torch.testing.assert_close(found, F.scaled_dot_product_attention(*whole, attn_mask=mask, scale=0.5))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_bias_of_another_type_is_not_given_to_cudnn(dtype: torch.dtype, heads: int) -> None:
    """Which would read it as if it were of the queries' type."""
    graph = fx.Graph()
    examples = [torch.randn(s) for s in (SHAPE, *2 * [(1, heads, KEYS, 8)], (1, 1, 4, KEYS))]
    tensors = [*(t.to(dtype) for t in examples[:3]), examples[3]]
    nodes = [graph.placeholder(name) for name in "qkvb"]
    for n, t in zip(nodes, tensors, strict=True):
        n.meta["val"] = t
    made = graph.call_function(aten._scaled_dot_product_cudnn_attention.default, (*nodes, False))
    made.meta["val"] = (tensors[0], *[None] * 8)
    first = graph.call_function(operator.getitem, (made, 0))
    first.meta["val"] = tensors[0]
    graph.output((first,))
    captured = from_fx(fx.GraphModule(torch.nn.Module(), graph))
    whole = [tensors[0], *(t.expand(1, 2, KEYS, 8) for t in tensors[1:3]), tensors[3]]
    wanted = F.scaled_dot_product_attention(*(t.double() for t in whole))
    (numbers,) = run_graph(captured, [t.float().numpy() for t in tensors])
    by_kernels = torch.as_tensor(numbers.astype("float64"))
    (op,) = select(normalise(captured)).ops
    assert op.call is not None
    args = [tensors[a.index] if isinstance(a, Operand) else a for a in op.call.args]
    by_call = op.call.function(*args, **dict(op.call.kwargs))[op.call.places[0]]  # type: ignore[index]
    for found in (by_kernels, by_call):
        torch.testing.assert_close(found.double(), wanted, atol=2e-2, rtol=0)
