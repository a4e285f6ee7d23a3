"""What composites leave behind when torch takes them apart: results lie and err as those of the op's own kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tilewright
from tilewright.accuracy import compare

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


def test_the_logarithm_of_the_normal_distribution_near_zero() -> None:
    """Split at 1, as torch's own parts are, it errs 3 times as much as eager's between -1 and 1."""
    x = torch.linspace(-4, 4, 8192)
    program = torch.special.log_ndtr
    made = tilewright.compile(program, (x,))(x)
    assert isinstance(made, Tensor)
    verdict = compare(made, program(x), program(x.double()))
    assert verdict.passed and verdict.smallest_k < 1.2, verdict


@pytest.mark.parametrize("n", [5, 258, 70_000])
def test_an_identity_of_any_size(n: int) -> None:
    """Torch's own parts count rows beyond 255 in 16 bits without a sign, which few kernels take."""

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.eye(2, n) * x, torch.eye(n, 1, dtype=torch.int32)

    x = torch.randn(n)
    tilewright.reset()
    made = torch.compile(call, backend=tilewright.backend)(x)
    assert tilewright.stats().fallbacks == 0
    for a, b in zip(made, call(x), strict=True):
        assert a.dtype is b.dtype and torch.equal(a, b)


def test_what_a_composite_draws_is_drawn_by_its_op() -> None:
    """Of `rand(..) < p`, which torch makes of it, a GPU draws other numbers than eager does."""
    tilewright.reset()
    x = torch.rand(20, 30)
    compiled = torch.compile(lambda x: x * torch.bernoulli(x), backend=tilewright.backend)
    torch.manual_seed(3)
    got, after = compiled(x), torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(got, x * torch.bernoulli(x)) and torch.equal(after, torch.rand(3))
    assert [c.name for made in tilewright.compilations() for c in made.calls] == ["aten.bernoulli"]
