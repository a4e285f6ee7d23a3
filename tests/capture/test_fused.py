"""How attention is given to torch, so that it takes a fused routine."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tilewright.capture.fused import lay_masks


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


def test_fused_attention_gets_rows_where_a_norm_keeps_channels_last() -> None:
    """The norm's kernel lays its result as its operand lies. Torch chose the routine for rows side by side."""

    def program(x: torch.Tensor) -> torch.Tensor:
        normed = F.layer_norm(x, x.shape[-1:])
        return F.scaled_dot_product_attention(normed, normed, normed, is_causal=True)

    x = torch.randn(2, 4, 12, 12).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(program, backend="tilewright")(x), program(x))
