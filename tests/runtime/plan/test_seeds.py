"""Where the gradient of attention with dropout looks for the state of the generator."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload

from tilewright.runtime.plan.seeds import LOOK_FOR_SEEDS, SEEDS, finding_seeds


def test_the_named_arguments_exist() -> None:
    for name in LOOK_FOR_SEEDS:
        op = getattr(torch.ops.aten, name).default
        names = [a.name for a in op._schema.arguments]
        assert {*SEEDS, "dropout_p"} <= set(names)


@pytest.fixture
def backward() -> Generator[OpOverload]:
    library = torch.library.Library("tilewright_seeds", "FRAGMENT")
    library.define("backward(Tensor x, Tensor philox_seed, Tensor philox_offset, float dropout_p) -> bool")
    library.impl(
        "backward", lambda x, seed, offset, p: seed.is_cpu and offset.is_cpu, "CompositeExplicitAutograd"
    )  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType]
    yield torch.ops.tilewright_seeds.backward.default
    library._destroy()


@pytest.mark.parametrize(
    ("chance", "captures", "on_host"), [(0.5, False, True), (0.5, True, False), (0.0, False, False)]
)
def test_they_lie_where_the_op_looks(
    chance: float, captures: bool, on_host: bool, backward: OpOverload, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The device's memory is torch's meta device here, `cpu` what brings it to the host."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    monkeypatch.setattr(Tensor, "cpu", lambda t: torch.zeros(t.shape, dtype=t.dtype))  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType, reportUnknownArgumentType]
    seed = torch.zeros((), dtype=torch.int64, device="meta")
    call, x = finding_seeds(backward), torch.zeros(2)
    assert call(x, seed, seed, chance) is on_host
    assert call(x, seed, philox_offset=seed, dropout_p=chance) is on_host
