"""What is compiled here counts for nothing that torch limits, and weights are frozen whatever torch is set to."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright.runtime.call import dynamo

COUNT = 9
"""One more than torch compiles of one code object."""


class Scaled(nn.Module):
    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) * self.by


@pytest.fixture(params=[True, False], ids=["isolated", "own code"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """How targets are told apart: torch's way where it has one, and ours."""
    if request.param and not dynamo._ISOLATES:
        pytest.skip("this torch cannot")
    monkeypatch.setattr(dynamo, "_ISOLATES", request.param)
    tilewright.reset()
    yield
    tilewright.reset()


@pytest.mark.usefixtures("way")
def test_many_models_of_one_class_leave_torch_its_limit() -> None:
    x = torch.randn(3, 4)
    models = [Scaled(k) for k in range(COUNT)]
    ours = [tilewright.compile(m, (x,)) for m in models]
    before = tilewright.stats().graphs
    last = Scaled(99)
    torch.testing.assert_close(torch.compile(last, backend=tilewright.backend)(x), last(x))
    assert tilewright.stats().graphs == before + 1
    for model, compiled in zip(models, ours, strict=True):
        torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(ours[0](torch.ones(5, 4)), models[0](torch.ones(5, 4)))


def test_weights_are_frozen_beside_another_compilers_freezing() -> None:
    model, x = nn.Linear(2048, 640).eval(), torch.randn(8, 2048)
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        ours = tilewright.compile(model, (x,), freeze=True)
        torch.testing.assert_close(ours(x), model(x))
        assert any(call.ops == ("aten.addmm",) and call.name != "aten.addmm" for call in ours.calls)
        count = len(tilewright.compilations())
        theirs = torch.compile(model, backend=tilewright.backend, options={"freeze": True})
        torch.testing.assert_close(theirs(x), model(x))
        (found,) = tilewright.compilations()[count:]
        trace = found.trace["freeze"]
        assert len(getattr(trace, "constants")) == 2  # noqa: B009
        model.weight.mul_(2)
        torch.testing.assert_close(theirs(x), model(x))
