"""What eager mode refuses for the types of its operands, and what is no such thing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright

Program = Callable[[Tensor, Tensor], object]
REFUSED: dict[str, Program] = {
    "a number less truth values": lambda x, m: x - m,
    "1 less truth values": lambda x, m: 1 - m,
    "the largest of truth values": lambda x, m: m.argmax(1),
    "truth values cut off": lambda x, m: m.relu(),
    "rounded truth values": lambda x, m: m.round(),
    "a product of truth values": lambda x, m: m @ m.T,
    "a product of two types": lambda x, m: x @ x.double().T,
    "a layer of two types": lambda x, m: F.linear(x, x.half()),
    "a product with integers": lambda x, m: torch.mv(x, m[0].int()),
}
TAKEN: dict[str, Program] = {
    "a choice": lambda x, m: torch.where(m, x, 0) * 2,
    "a product by elements": lambda x, m: x * m + m.sum(0),
    "a sum of two types": lambda x, m: x + x.double(),
    "counted": lambda x, m: m.cumsum(0) - m.int(),
    "some rows": lambda x, m: x[m.sum(1) % 3] * 2,
    "some elements": lambda x, m: x.gather(1, m.long()) * 2,
    "a table": lambda x, m: F.embedding(m.int(), x) * 2,
    "hidden": lambda x, m: x.masked_fill(m, -1.0).softmax(1),
    "a power": lambda x, m: x.abs() ** m.int(),
    "a norm of halves with weights of singles": lambda x, m: F.layer_norm(x.bfloat16(), (8,), x[0], x[1]),
}


def _operands() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(5, 8)
    return x, x > 0.5


@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_mode_refuses_is_refused(name: str) -> None:
    """Torch's fake kernels take these types, and a kernel would compute something."""
    with pytest.raises(RuntimeError) as expected:
        REFUSED[name](*_operands())
    torch._dynamo.reset()
    with pytest.raises(RuntimeError) as raised:
        torch.compile(REFUSED[name], backend="tilewright")(*_operands())
    assert str(raised.value).splitlines()[0] == str(expected.value).splitlines()[0]


@pytest.mark.parametrize("name", TAKEN)
def test_other_types_are_compiled(name: str) -> None:
    tilewright.reset()
    torch.compile(TAKEN[name], backend="tilewright")(*_operands())
    (made,) = tilewright.compilations()
    assert made.coverage.generated and "refuses" not in str(made.coverage)
