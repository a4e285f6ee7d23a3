"""Which sources are built of a cover for a GPU, without building them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from tests.emit.triton_corpus import BY_NAME
from tests.schedule.run import capture
from tilewright import building
from tilewright.emit.triton import TritonSource
from tilewright.options import Options
from tilewright.partition.fusion import partition
from tilewright.runtime.covers import Covers
from tilewright.runtime.cuda_build import Built
from tilewright.runtime.cuda_driver import Device
from tilewright.schedule.solver import Solver
from tilewright.target import preset


@pytest.mark.parametrize(
    ("name", "dynamic", "length", "once", "usual"),
    [("softmax", True, 200, 1, 14), ("softmax", True, 208, 1, 14), ("softmax", False, 200, 1, 1)],
)
def test_a_trial_builds_what_it_runs(
    monkeypatch: pytest.MonkeyPatch, name: str, dynamic: bool, length: int, once: int, usual: int
) -> None:
    made: list[TritonSource] = []

    def build(sources: Sequence[TritonSource], **_: object) -> list[Built]:
        made.extend(sources)
        return [cast(Built, None)] * len(sources)

    monkeypatch.setattr(building, "build_kernels", build)
    monkeypatch.setattr(building, "device", lambda *_: cast(Device, None))
    graph = capture(BY_NAME[name], dynamic)
    solver = Solver(preset("sm_90"), Options())
    symbols = graph.symbols()
    sizes = dict(zip(map(str, symbols), (33, length), strict=False))
    builder = building.Builder(building.in_silence, solver, cast(Covers, None), sizes)
    cover = partition(graph, solver.price)
    for exact, wanted in (True, once), (False, usual):
        made.clear()
        kernels = builder.built([cover], symbols, once=exact)
        assert len(made) == wanted and kernels.unit is not None
    (aligned,) = {bool(s.divisible) for s in made[:1]} if not dynamic else {length % 16 == 0}
    made.clear()
    builder.built([cover], symbols, once=True)
    assert bool(made[0].divisible) == aligned
