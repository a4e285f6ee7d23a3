"""A function has one value for an element, however many lanes it is computed with: what a kernel computes again equals
what another one stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tilewright

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    name: getattr(torch, name) for name in ("exp", "exp2", "expm1", "tanh", "erf", "sigmoid", "sinh", "cosh")
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_element_and_many(name: str) -> None:
    function = FUNCTIONS[name]
    x = torch.linspace(-4, 4, 4096)
    many = tilewright.compile(function, (x,))(x)
    assert isinstance(many, Tensor)
    single = tilewright.compile(function, (x[:1],))
    made = [single(x[k : k + 1].clone()) for k in range(0, 4096, 97)]
    assert torch.equal(torch.cat([y for y in made if isinstance(y, Tensor)]), many[::97])
    parts = tilewright.compile(lambda x: torch.cat([x, function(x)], 1), (x.view(1024, 4),))(x.view(1024, 4))
    assert isinstance(parts, Tensor) and torch.equal(parts[:, 4:].flatten(), many)
