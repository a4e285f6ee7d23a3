"""Running sums along keys inside attention: values of a step are read in that step, whichever end they begin at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.end_to_end.attention.split_keys import right
from tests.support.triton.absent_gpu import compiled
from torch import Tensor

from tilewright.ir.expr import Axis, axes_of
from tilewright.ir.program import Prefix
from tilewright.ir.schedule import Role, Schedule
from tilewright.ir.sizes import dims

Function = Callable[..., Tensor]
DEPTH = 16


def scores(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)).float() * DEPTH**-0.5


def below(s: Tensor) -> Tensor:
    """Whether a key lies before its query."""
    return torch.arange(s.shape[-2])[:, None] > torch.arange(s.shape[-1])


def weighed(s: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(s, -1).to(v.dtype) @ v


def summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weighed(torch.cumsum(scores(q, k), -1) * 0.1, v)


def gated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Places that depend on what is seen: gates summed from each key to the query."""
    s = scores(q, k)
    gates = torch.sigmoid(s).masked_fill(~below(s), 0.0)
    far = gates.flip(-1).cumsum(-1).flip(-1)
    return weighed(
        (s - 0.1 * far).masked_fill(~below(s) & ~torch.eye(s.shape[-1], dtype=torch.bool), -torch.inf), v
    )


def hidden_later(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The sum sees all keys up to its own, the softmax fewer."""
    s = scores(q, k)
    return weighed(
        torch.cumsum(s, -1).masked_fill(~below(s) & ~torch.eye(s.shape[-1], dtype=torch.bool), -torch.inf), v
    )


def in_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The sum sees keys that are too far away for the softmax."""
    s = scores(q, k)
    far = torch.arange(s.shape[-2])[:, None] - torch.arange(s.shape[-1])
    return weighed((torch.cumsum(s, -1) * 0.1).masked_fill((far < 0) | (far > 20), -torch.inf), v)


def stick_breaking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = scores(q, k)
    left = F.logsigmoid(-z).masked_fill(~below(z), 0.0)
    behind = left.flip(-1).cumsum(-1).flip(-1) - left
    return torch.exp(F.logsigmoid(z) + behind).masked_fill(~below(z), 0.0).to(v.dtype) @ v


def products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No softmax, and a running maximum."""
    return torch.relu(scores(q, k) - torch.cummax(scores(q, k), -1)[0] * 0.5).to(v.dtype) @ v


CASES: dict[str, Function] = {
    "summed": summed, "gated": gated, "hidden later": hidden_later, "stick breaking": stick_breaking,
    "maximum": products,
}  # fmt: skip


def operands(places: int, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    return [torch.randn(1, 2, places, DEPTH).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("places", [96, 77])
@pytest.mark.parametrize("name", CASES)
def test_one_kernel_runs_along_keys(name: str, places: int, tmp_path: Path) -> None:
    function, given = CASES[name], operands(places)
    made = compiled(function, given)
    assert any(isinstance(s, Prefix) for k in made.kernels for s in k.program.statements())
    stored = max(dims.static(v.numel) or 0 for k in made.kernels for v in k.kernel.outputs)
    assert stored < 2 * places * places
    right(made, function, given, tmp_path if places == 77 else None)


def test_what_lies_before_is_summed_though_nothing_else_sees_it() -> None:
    given = operands(260)
    made = compiled(in_window, given)
    (kernel,) = made.kernels
    right(made, in_window, given)
    loops = [s for s in kernel.program.loops() if s.axis == keys_of(kernel.schedule)]
    assert all(not axes_of(s.start) or axes_of(s.stop) for s in loops)
    assert any(axes_of(s.stop) for s in loops), "what lies behind a query is left out"
    assert any(dims.static(s.start) == 0 for s in loops), "what lies before is not"


def keys_of(schedule: object) -> Axis:
    assert isinstance(schedule, Schedule)
    (found,) = [c.axis for c in schedule.tiling.classes if c.role is Role.SCAN]
    return found
