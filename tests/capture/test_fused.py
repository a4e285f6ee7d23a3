"""How attention is given to torch, so that it takes a fused routine."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright.capture.autograd import joint
from tilewright.capture.fused import attend_without_cudnn, avoid_wrong_routines, lay_masks


def traced(device: str, *, dense: bool) -> fx.GraphModule:
    with FakeTensorMode():
        q = torch.empty(2, 4, 16, 8, device=device)
        mask = torch.empty(16, 1 if not dense else 16, device=device).expand(2, 1, 16, 16)
    graph = fx.Graph()
    x, m = graph.placeholder("x"), graph.placeholder("m")
    x.meta["example_value"], m.meta["example_value"] = q, mask
    graph.output(graph.call_function(F.scaled_dot_product_attention, (x, x, x), {"attn_mask": m}))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize(
    ("device", "dense", "laid"), [("cuda", False, 1), ("cuda", True, 0), ("cpu", False, 0)]
)
def test_a_mask_that_repeats_an_element_is_laid_densely(device: str, dense: bool, laid: int) -> None:
    gm = traced(device, dense=dense)
    lay_masks(gm)
    assert len(gm.graph.find_nodes(op="call_method", target="contiguous")) == laid
    q, mask = torch.randn(2, 4, 16, 8), torch.randn(16, 1).expand(2, 1, 16, 16)
    torch.testing.assert_close(gm(q, mask), F.scaled_dot_product_attention(q, q, q, mask))


def test_masks_without_dims_and_of_free_sizes_are_left_alone() -> None:
    """A question about a free size would be a guard."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    free = mode.from_tensor(
        torch.empty(5, 16),
        symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.DYNAMIC]),
    )
    gm = traced("cpu", dense=True)
    (m,) = (n for n in gm.graph.nodes if n.name == "m")
    for mask in (free.t(), mode.from_tensor(torch.tensor(True))):
        m.meta["example_value"] = mask
        before = len(env.guards)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(mask), "device", torch.device("cuda"))
            lay_masks(gm)
        assert len(env.guards) == before
        assert not gm.graph.find_nodes(op="call_method", target="contiguous")


HALF, SINGLE = torch.bfloat16, torch.float32


def attends(device: str, keys: int, dtype: torch.dtype, mask_dtype: torch.dtype) -> fx.GraphModule:
    with FakeTensorMode():
        q, k = (torch.empty(2, 4, n, 8, device=device, dtype=dtype) for n in (16, keys))
        mask = torch.empty(16, keys, device=device, dtype=mask_dtype)
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in ("q", "k", "m")]
    for node, example in zip(given, (q, k, mask), strict=True):
        node.meta["example_value"] = example
    a, b, m = given
    graph.output(
        graph.call_function(F.scaled_dot_product_attention, (a,), {"key": b, "value": b, "attn_mask": m})
    )
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize(
    ("device", "keys", "dtype", "mask_dtype", "typed", "other"),
    [
        ("cuda", 64, HALF, HALF, 0, 1), ("cuda", 704, HALF, torch.bool, 0, 1), ("cuda", 128, HALF, HALF, 0, 0),
        ("cuda", 96, HALF, HALF, 0, 0), ("cuda", 128, HALF, SINGLE, 1, 0), ("cuda", 192, HALF, SINGLE, 1, 1),
        ("cuda", 128, SINGLE, SINGLE, 0, 0), ("cpu", 64, HALF, SINGLE, 0, 0),
    ],
)  # fmt: skip
def test_masks_that_cudnn_gets_wrong_go_to_another_routine(
    device: str, keys: int, dtype: torch.dtype, mask_dtype: torch.dtype, typed: int, other: int
) -> None:
    gm = attends(device, keys, dtype, mask_dtype)
    avoid_wrong_routines(gm)
    assert len(gm.graph.find_nodes(op="call_method", target="to")) == typed
    assert len(gm.graph.find_nodes(op="call_function", target=attend_without_cudnn)) == other
    q, k = torch.randn(2, 4, 16, 8, dtype=dtype), torch.randn(2, 4, keys, 8, dtype=dtype)
    mask = (torch.randn(16, keys) > 0).to(mask_dtype)
    wanted = F.scaled_dot_product_attention(q, k, k, mask if mask_dtype == torch.bool else mask.to(dtype))
    torch.testing.assert_close(gm(q, k, mask), wanted)


@pytest.mark.parametrize("mask_dtype", [HALF, SINGLE])
def test_masks_are_laid_densely_for_the_other_routine(mask_dtype: torch.dtype) -> None:
    gm = attends("cuda", 64, HALF, mask_dtype)
    (m,) = (n for n in gm.graph.nodes if n.name == "m")
    with FakeTensorMode():
        m.meta["example_value"] = torch.empty(16, 1, device="cuda", dtype=mask_dtype).expand(16, 64)
    avoid_wrong_routines(gm)
    lay_masks(gm)
    (node,) = gm.graph.find_nodes(op="call_function", target=attend_without_cudnn)
    given: list[torch.Tensor] = []
    node.target = lambda q, attn_mask, **_: (given.append(attn_mask), q)[1]
    gm.recompile()
    gm(
        *(torch.randn(2, 4, n, 8, dtype=HALF) for n in (16, 64)),
        torch.randn(16, 1, dtype=mask_dtype).expand(16, 64),
    )
    assert given[0].is_contiguous() and given[0].dtype is HALF


def test_what_is_computed_again_for_gradients_is_looked_at() -> None:
    """Its graph is a part of the program's."""
    inner = attends("cuda", 64, HALF, SINGLE)
    root, graph = torch.nn.Module(), fx.Graph()
    root.add_module("wrap_body_0", inner)
    given = [graph.placeholder(name) for name in ("q", "k", "m")]
    graph.output(graph.call_module("wrap_body_0", tuple(given)))
    gm = fx.GraphModule(root, graph)
    avoid_wrong_routines(gm)
    assert inner.graph.find_nodes(op="call_function", target=attend_without_cudnn)
    q, k = (torch.randn(2, 4, n, 8, dtype=HALF) for n in (16, 64))
    mask = torch.randn(16, 64)
    torch.testing.assert_close(gm(q, k, mask), F.scaled_dot_product_attention(q, k, k, mask.to(HALF)))


def test_programs_that_are_trained_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[fx.GraphModule] = []
    monkeypatch.setattr(joint, "avoid_wrong_routines", seen.append)
    x = torch.randn(2, 3, requires_grad=True)
    torch.compile(lambda x: x * 2, backend="tilewright")(x).sum().backward()
    assert seen


def test_a_free_number_of_keys_may_be_one_that_cudnn_gets_wrong() -> None:
    """Another routine is taken without a question about the size, which would be a guard."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    free = StatelessSymbolicContext(
        [DimDynamic.STATIC, DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC]
    )
    gm = attends("cuda", 128, HALF, HALF)
    (k,) = (n for n in gm.graph.nodes if n.name == "k")
    k.meta["example_value"] = mode.from_tensor(torch.empty(2, 4, 128, 8), symbolic_context=free)
    avoid_wrong_routines(gm)
    assert gm.graph.find_nodes(op="call_function", target=attend_without_cudnn)
    assert not env.guards


@pytest.mark.parametrize("others", [True, False])
def test_what_torch_may_take_stays_as_it_is(others: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    cuda = torch.backends.cuda

    def watched(q: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        seen.append(cuda.cudnn_sdp_enabled())
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    q = torch.randn(1, 2, 4, 8)
    backends = [SDPBackend.CUDNN_ATTENTION, *([SDPBackend.MATH] if others else [])]
    with sdpa_kernel(backends):
        attend_without_cudnn(q, q, q)
        assert seen == [not others], "the program allows nothing else"
        assert cuda.cudnn_sdp_enabled() and cuda.math_sdp_enabled() is others


def test_fused_attention_gets_rows_where_a_norm_keeps_channels_last() -> None:
    """The norm's kernel lays its result as its operand lies. Torch chose the routine for rows side by side."""

    def program(x: torch.Tensor) -> torch.Tensor:
        normed = F.layer_norm(x, x.shape[-1:])
        return F.scaled_dot_product_attention(normed, normed, normed, is_causal=True)

    x = torch.randn(2, 4, 12, 12).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(program, backend="tilewright")(x), program(x))
