"""All blocks of products of a kernel are counted and timed at once: each is what it is alone, and none is alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.triton.absent_gpu import compiled
from torch import Tensor

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.ir.dtype import f16, i64
from tilewright.ir.expr import Axis, axis, make
from tilewright.ir.sizes import dims
from tilewright.schedule.gpu import matmul
from tilewright.schedule.gpu.block_memory import ProductSide, registers, shared_bytes
from tilewright.target import preset


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax((q @ k.mT).float(), -1).to(v.dtype) @ v


def chained(q: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """More products than a block has with large tiles alone; two read the same keys."""
    s, t = q @ k.mT, w @ k.mT
    return (s * t) @ v + (s + t) @ u


def summed(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def empty(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float16) -> list[Tensor]:
    return [torch.empty(s, dtype=dtype) for s in shapes]


CASES: dict[str, tuple[Callable[..., Tensor], Sequence[Tensor]]] = {
    "product": (summed, empty((1024, 512), (512, 768))),
    "single": (summed, empty((1024, 512), (512, 768), dtype=torch.float32)),
    "attention": (attend, empty(*((4, 512, 64),) * 3)),
    "attention of singles": (attend, empty(*((4, 512, 64),) * 3, dtype=torch.float32)),
    "chained": (chained, empty(*((4, 512, 64),) * 5)),
}


def searches(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[matmul.BlockModel, matmul.BlockGrid]]:
    """What was searched for the kernels of a case."""
    found: list[tuple[matmul.BlockModel, matmul.BlockGrid]] = []
    plain = matmul._legal  # pyright: ignore[reportPrivateUsage]

    def noted(known: Any, grid: Any, limits: Any, target: Any) -> Any:
        found.append((matmul.BlockModel(known, target, NO_HINTS), grid))
        return plain(known, grid, limits, target)

    monkeypatch.setattr(matmul, "_legal", noted)
    compiled(*CASES[name])
    return found


@pytest.mark.parametrize("name", CASES)
def test_each_candidate_is_what_it_is_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = searches(monkeypatch, name)
    assert found
    draw = np.random.default_rng(0)
    for model, grid in found[:3]:
        shape, target = grid.may.shape, preset("sm_90")
        held = np.broadcast_to(registers(model.known, grid, target), shape)
        needed = np.broadcast_to(shared_bytes(model.known, grid), shape)
        seconds = np.broadcast_to(model.seconds(grid), shape)
        for _ in range(40):
            place = tuple(int(draw.integers(n)) for n in shape)
            alone = grid.candidate(place)
            assert registers(model.known, alone, target) == held[place]
            assert shared_bytes(model.known, alone) == needed[place]
            assert model.seconds(alone) == pytest.approx(seconds[place], rel=1e-12)


def test_candidates_cost_no_call_each(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def count(name: str) -> None:
        plain = getattr(matmul, name)

        def counted(*given: Any, **flags: Any) -> Any:
            calls[name] += 1
            return plain(*given, **flags)

        monkeypatch.setattr(matmul, name, counted)

    for name in ("registers", "shared_bytes"):
        count(name)
    found = searches(monkeypatch, "chained")
    candidates = sum(grid.may.size for _, grid in found)
    assert candidates > 30 * len(found)
    # those that fit, their seconds, and those of each schedule that is compared
    assert max(calls.values()) < 8 * len(found)


def test_sides_are_the_same_block_whatever_their_classes_are_called() -> None:
    n, d = dims.integer(512), dims.integer(64)
    a, b, x, y, z = Axis("a", n), Axis("b", n), Axis("x", n), Axis("y", n), Axis("z", d)

    def side(row: Axis, column: Axis) -> ProductSide:
        place = dims.add(dims.mul(axis(row), dims.integer(512)), axis(column))
        return ProductSide(make("read", (place,), f16, 0), row, True, True, True, ())

    one, two = side(a, b), side(x, y)
    assert one.is_same_block(one, {})
    assert one.is_same_block(two, {a: 64, b: 32, x: 64, y: 32})
    assert not one.is_same_block(two, {a: 64, b: 32, x: 32, y: 64})
    assert not one.is_same_block(two, {a: 64, b: 64, x: 64, y: 64})  # which class is which is not told
    assert not one.is_same_block(side(x, z), {a: 64, b: 32, x: 64, z: 32})
    many = {a: np.array([64, 64]), b: 32, x: 64, y: np.array([32, 16])}
    assert list(one.is_same_block(two, many)) == [True, False]


def test_an_axis_that_is_changed_has_another_hash() -> None:
    extent = make("const", (), i64, 4)
    one = Axis("a", extent)
    assert hash(one) == hash(Axis("a", extent)) and one == Axis("a", extent)
    other = replace(one, name="b")
    assert hash(other) == hash(Axis("b", extent)) != hash(one) and other != one


def test_one_block_takes_as_long_as_one_in_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block multiplies on its own core, however many others stand idle."""
    cores = preset("sm_90").cores
    found: list[float] = []
    for rows in (128, 128 * cores):
        monkeypatch.setitem(CASES, "rows", (summed, empty((rows, 8192), (8192, 128))))
        model, grid = searches(monkeypatch, "rows")[0]
        m, n, k = model.known.tiled
        chosen = [c for place in np.ndindex(grid.may.shape) if (c := grid.candidate(place)).warps == 8]
        wanted = [c for c in chosen if (c.tiles[m], c.tiles[n], c.tiles[k], c.stages) == (128, 128, 64, 4)]
        assert len(wanted) == 1 and model.counts(wanted[0])[0] == rows // 128
        found.append(float(model.seconds(wanted[0])))
    assert found[0] == pytest.approx(found[1], rel=1e-9)
