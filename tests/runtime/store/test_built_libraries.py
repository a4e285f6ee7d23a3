"""What a later compilation of equal kernels takes from the cache without scheduling or printing them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright
from tilewright.pipeline import build
from tilewright.pipeline.backends import cpu
from tilewright.plan.reports import KernelReport


@pytest.fixture(autouse=True)
def fresh() -> None:
    tilewright.reset()


def program(x: Tensor) -> Tensor:
    return torch.softmax(torch.tanh(x) * 2, -1)


def compiled(f: Callable[[Tensor], Tensor] = program, **how: Any) -> tilewright.CompiledModel:
    torch._dynamo.reset()
    return tilewright.compile(f, (torch.randn(4, 9),), **how)


@pytest.fixture
def unprinted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is scheduled or printed from here on."""

    def refused(*_: object) -> None:
        raise AssertionError("the library was not recalled")

    monkeypatch.setattr(cpu, "emit_units", refused)
    monkeypatch.setattr(build.Solver, "solve", refused)


def test_a_library_is_recalled_by_its_kernels(request: pytest.FixtureRequest) -> None:
    compiled()
    request.getfixturevalue("unprinted")
    again = compiled()
    x = torch.randn(4, 9)
    torch.testing.assert_close(again(x), program(x))
    found = tilewright.stats()
    assert (found.units, found.cache_hits, found.kernels) == (1, 1, 2)


def test_what_was_recalled_is_shown_when_asked_for() -> None:
    first, again = compiled(), compiled()
    assert tilewright.stats().cache_hits == 1
    (old,), (new,) = first.kernels, again.kernels
    assert isinstance(old, KernelReport) and isinstance(new, KernelReport)
    assert (new.source, new.schedule, new.reason) == (old.source, old.schedule, old.reason)
    for phase in ("schedule", "emit"):
        assert len(again.trace[phase]) == len(first.trace[phase])  # type: ignore[index]


@pytest.mark.parametrize(
    ("f", "how"),
    [
        (lambda x: torch.softmax(torch.tanh(x) * 3, -1), {}),
        (program, {"options": {"trim": "exact"}}),
        (program, {"dims": {"x": {0: "n"}}}),
    ],
    ids=["another constant", "another option", "symbolic sizes"],
)
def test_others_are_built(
    f: Callable[[Tensor], Tensor], how: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    compiled()
    request.getfixturevalue("unprinted")
    with pytest.raises(Exception, match="not recalled"):
        compiled(f, **how)


def test_another_range_of_sizes_is_another_task() -> None:
    compiled(dims={"x": {1: ("n", 2, 16)}})
    compiled(dims={"x": {1: ("n", 2, 4096)}})
    assert tilewright.stats().graphs == 2
    x = torch.randn(4, 300)
    wide = compiled(dims={"x": {1: ("n", 2, 4096)}})
    torch.testing.assert_close(wide(x), program(x))


def test_a_damaged_library_is_built_again(tmp_path: Path) -> None:
    compiled()
    root = Path(os.environ["TILEWRIGHT_CACHE_DIR"])
    for library in root.rglob("*.so"):
        library.unlink()  # the old one is mapped
        library.write_bytes(b"damaged")
    x = torch.randn(4, 9)
    torch.testing.assert_close(compiled()(x), program(x))
