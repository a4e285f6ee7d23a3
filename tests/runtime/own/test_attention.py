"""Attention in code of our own against eager: masks, shared heads, odd sizes, strides."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.library_calls import agrees, calls, captured, fast, products
from torch import Tensor, nn
from torch.nn import functional as F

from tilewright.library.select import call_contractions
from tilewright.rewrite import interpret
from tilewright.rewrite.normal.normalise import normalise


class Attend(nn.Module):
    """Scaled dot product attention with fixed options."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, **self.options)  # type: ignore[arg-type]


def heads(*shape: int) -> Tensor:
    """[batch, heads, places, depth] that lies as [batch, places, heads, depth]."""
    batch, count, places, depth = shape
    return torch.randn(batch, places, count, depth).transpose(1, 2)


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": 0.25}], ids=["plain", "causal", "scaled"]
)
@pytest.mark.parametrize(
    "sizes", [(2, 3, 128, 64), (1, 2, 601, 32), (1, 2, 100, 80), (1, 1, 1100, 130)], ids=str
)
def test_attention_agrees_with_eager(sizes: tuple[int, ...], options: dict[str, object]) -> None:
    args = [heads(*sizes), torch.randn(sizes), heads(*sizes)]
    m = Attend(**options)
    g = fast(captured(m, args), products())
    assert calls(g) == ["attention"]
    agrees(g, m, args)


def test_other_numbers_of_keys_and_masks_of_every_shape() -> None:
    q, k, v = heads(2, 3, 50, 64), heads(2, 3, 170, 64), heads(2, 3, 170, 64)
    for shape in [(2, 3, 50, 170), (1, 1, 50, 170), (2, 1, 1, 170), (50, 170), (2, 3, 50, 1)]:
        mask = torch.randn(shape)
        g = fast(captured(Attend(), [q, k, v, mask]), products())
        assert calls(g) == ["attention"], shape
        agrees(g, Attend(), [q, k, v, mask])


def test_keys_that_nobody_may_see_and_rows_without_any() -> None:
    q, k, v = heads(1, 2, 120, 32), heads(1, 2, 700, 32), heads(1, 2, 700, 32)
    mask = torch.zeros(120, 700)
    mask[:, 100:650], mask[3] = -math.inf, -math.inf
    g = fast(captured(Attend(), [q, k, v, mask]), products())
    from tilewright.interp import run_graph

    (got,) = run_graph(g, [q, k, v, mask])
    torch.testing.assert_close(torch.from_numpy(got), F.scaled_dot_product_attention(q, k, v, mask))  # type: ignore[arg-type]


def test_nan_reaches_its_rows_only() -> None:
    q, k, v = heads(1, 2, 120, 32), heads(1, 2, 130, 32), heads(1, 2, 130, 32)
    q[0, 1, 7] = math.nan
    from tilewright.interp import run_graph

    (got,) = run_graph(fast(captured(Attend(), [q, k, v]), products()), [q, k, v])
    want = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(torch.from_numpy(got).isnan(), want.isnan())  # type: ignore[arg-type]


def test_sizes_may_be_dynamic() -> None:
    args = [torch.randn(2, 3, 128, 64) for _ in range(3)]
    g = fast(captured(Attend(is_causal=True), args, dynamic=[[True, False, True, False]] * 3), products())
    assert calls(g) == ["attention"]
    for batch, places in ((2, 128), (3, 77)):
        agrees(g, Attend(is_causal=True), [torch.randn(batch, 3, places, 64) for _ in range(3)])


@pytest.mark.parametrize("sizes", [(4, 3, 49, 32), (1, 2, 200, 16)], ids=str)
def test_small_attention_stays_with_torch(sizes: tuple[int, ...]) -> None:
    args = [torch.randn(sizes) for _ in range(3)]
    g = fast(captured(Attend(), args), products())
    assert calls(g) != ["attention"] and len(calls(g)) == 1
    agrees(g, Attend(), args)


@pytest.mark.parametrize("low", [-float("inf"), torch.finfo(torch.float32).min, -1e9], ids=str)
def test_blocks_behind_a_mask(low: float) -> None:
    """Blocks that no query of a tile sees are left out, unless some query sees nothing: there all count alike."""
    q, k, v = (torch.randn(2, 3, 700, 32) for _ in range(3))
    causal = torch.ones(700, 700).triu(1).bool()
    islands = (torch.arange(700)[:, None] // 70) != (torch.arange(700) // 70)
    blind = causal.clone()
    blind[321] = True
    for hidden in (causal, islands, causal.t(), *([blind] if low > -float("inf") else [])):
        mask = torch.zeros(1, 1, 700, 700).masked_fill(hidden, low)
        g = fast(captured(Attend(), [q, k, v, mask]), products())
        assert calls(g) == ["attention"]
        agrees(g, Attend(), [q, k, v, mask])


def test_calls_that_are_only_priced_rely_on_no_strides() -> None:
    """Views that the call reads through are gone, so its operands may have other dims than in the program: the vision
    model of SAM-HQ did not compile."""
    graph = normalise(captured(Attend(), [heads(2, 4, 30, 16) for _ in range(3)]), interpret)
    told = [op.call for op in call_contractions(graph).ops if op.call is not None]
    assert told and not any(call.lies or call.seen for call in told)
    assert any(origin.call.lies for origin in graph.origins if origin.call is not None)
