"""What composites leave behind when torch takes them apart: results lie as those of the op's own kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Function = Callable[[Tensor, Tensor, Tensor], Tensor]
CALLS: dict[str, Function] = {
    "index_add": lambda x, i, y: x.index_add(1, i, y, alpha=2),
    "index_copy": lambda x, i, y: x.index_copy(1, i, y),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_result_lies_as_its_op_says(name: str) -> None:
    torch._dynamo.reset()
    call = CALLS[name]
    x, y = (torch.randn(4, 4, n).mT for n in (9, 3))
    i = torch.tensor([4, 0, 7])
    want = call(x, i, y)
    got = torch.compile(call, backend="tilewright")(x, i, y)
    assert want.is_contiguous() and got.stride() == want.stride()
    torch.testing.assert_close(got, want)
    assert torch.equal(got.view(-1), got.flatten())
