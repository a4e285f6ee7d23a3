"""Graphs for any size take empty operands, which torch's kernels for the sizes at hand do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright.capture.trace import fits, trace


class Attends(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (0, 5), (3, 0)])
def test_attention_of_nothing(queries: int, keys: int) -> None:
    def tensors(queries: int, keys: int) -> list[Tensor]:
        return [torch.ones(1, h, n, 4) for h, n in ((4, queries), (2, keys), (2, keys))]

    program = trace(Attends(), tensors(7, 9), [[2]] * 3, [[(1, 2), (2, 2)]])
    given = tensors(queries, keys)
    assert fits(program, given)
    assert torch.allclose(program.gm(*given)[0], Attends()(*given))
