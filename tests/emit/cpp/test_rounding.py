"""Elements are rounded as the program says, whatever loop computes them."""

from __future__ import annotations

import torch
from torch import Tensor

import tilewright


def compiled(function: object, *inputs: Tensor) -> tuple[object, object]:
    """The results of our kernels and of eager."""
    assert callable(function)
    torch._dynamo.reset()
    with torch.no_grad():
        return tilewright.compile(function, inputs)(*inputs), function(*inputs)


def test_elements_round_as_in_eager() -> None:
    """No product of an element is contracted: sums, differences and chains of them are torch's to the last bit."""
    x, y, z = (torch.randn(37, 100) for _ in range(3))
    ours, theirs = compiled(
        lambda x, y, z: (x * y + z, x * y - y * z, ((x * y + 0.1) * y + z) * x + y), x, y, z
    )
    assert isinstance(ours, tuple) and isinstance(theirs, tuple)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_no_element_exceeds_the_maximum_of_all() -> None:
    """Scores are computed again after the loop that found their maximum."""

    def program(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        s = x * y + z * (z - 0.5)
        return (s > s.amax(-1, keepdim=True)).any(-1), (s == s.amax(-1, keepdim=True)).sum(-1)

    found, _ = compiled(program, *(torch.randn(64, 3000) for _ in range(3)))
    assert isinstance(found, tuple)
    above, at = found
    assert not above.any() and bool((at >= 1).all())
