"""What a region computes again: no chain of residual connections that is as long as the network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.support.normal_graph import Function
from torch import Tensor, nn

from tilewright.analysis.size_hints import SizeHints
from tilewright.capture.environment import traced_sizes
from tilewright.capture.fx import from_fx
from tilewright.capture.trace import trace
from tilewright.partition.regions import Region, find_regions
from tilewright.rewrite.normal.normalise import normalise


class Block(nn.Module):
    """A layer of a transformer, norms in front."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [batch, tokens, width]."""
        batch, tokens, width = x.shape
        first, second = self.norms
        split = self.qkv(first(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        y = (q @ k.transpose(-1, -2) / 4).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(second(x))))


def regions(layers: int) -> list[Region]:
    model = nn.Sequential(*(Block(64, 4) for _ in range(layers))).eval()
    with torch.no_grad():
        gm = trace(model, (torch.randn(3, 17, 64),), [(0, 1)]).gm
    typical = SizeHints({name: 2048 if size == 17 else size for name, size in traced_sizes(gm).items()})
    return find_regions(normalise(from_fx(gm)), typical, anywhere=True)


def test_a_layer_is_as_large_however_many_stand_before_it() -> None:
    few, many = regions(2), regions(5)
    assert len(many) > len(few) > 0
    assert max(len(r.ops) for r in many) == max(len(r.ops) for r in few)
    assert max(len(r.inputs) for r in many) == max(len(r.inputs) for r in few)


def test_a_sum_of_two_is_made_again() -> None:
    """Where what is made again reads no more than it is worth, a region does so."""

    def run(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        z = x + y
        return F.linear(F.linear(z, w).softmax(-1), w.t()), z.sum()

    given = torch.randn(24, 32), torch.randn(24, 32), torch.randn(64, 32)
    graph = normalise(from_fx(trace(Function(run), given, [(), (), ()]).gm))
    (found,) = find_regions(graph, SizeHints(), anywhere=True)
    assert "add" in {op.name for op in found.ops} and not {op.name for op in found.own} >= {"add"}
