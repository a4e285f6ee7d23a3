"""Where kernels that are launched early wait and release, what of that is refused, and that the meaning stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.support.tile_programs import matrices, softmax
from tests.support.triton.corpus import BY_NAME, entry

from tilewright.emit.triton.kernel import emit_triton
from tilewright.errors import VerifyError
from tilewright.interp.program import run_program
from tilewright.ir.dtype import bool_, f16, f32
from tilewright.ir.expr import Axis, const, integer
from tilewright.ir.program import (
    Await,
    Branch,
    Buffer,
    Check,
    Load,
    Loop,
    Release,
    Stmt,
    Store,
    TileProgram,
    Var,
)
from tilewright.lower.legalise import early_launch
from tilewright.lower.legalise.gpu import legalise_for_gpu
from tilewright.lower.variants import variants
from tilewright.target import preset

GPU = preset("sm_90")
EARLY = replace(GPU, early_launch="own")
BUFFER = Buffer("p0", f32, integer(8))
LOAD = Load(Var(0, f32), BUFFER, integer(0))
TRUE = const(True, bool_)
STORE = Store(BUFFER, integer(0), const(1.0, f32))
ONCE, OFTEN = (Loop(Axis("a", integer(n)), integer(0), integer(n), 1, ()) for n in (1, 4))


@pytest.mark.parametrize(
    "program",
    [softmax(512, 64, scratch=False), entry(BY_NAME["add_bias_gelu"], False).scheduled.program, matrices(f16, False)],
    ids=["rows", "all", "dot"],
)  # fmt: skip
def test_grid_points_wait_first_and_release_before_the_last_stores(
    program: TileProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        early_launch, "GPU_BLOCKS", replace(early_launch.GPU_BLOCKS, max_early_release_bytes=0)
    )
    made = legalise_for_gpu(program, EARLY)
    made.verify()
    assert made.body[0] == Await() and legalise_for_gpu(made, EARLY) == made
    names = [type(s) for s in made.statements()]
    behind = names[names.index(Release) :]
    assert Load not in behind or any(isinstance(s, Loop) and s.tile < 64 for s in made.statements())
    assert Store in behind
    text = emit_triton(made, (), variants(made)[0], "k0").text.split("tl.")
    calls = [x.split("(")[0] for x in text if x.startswith(("extra", "load", "store"))]
    assert calls[0] == "extra.cuda.gdc_wait" and calls.count("extra.cuda.gdc_launch_dependents") == 1
    assert all(not isinstance(s, (Await, Release)) for s in legalise_for_gpu(program, GPU).statements())


@pytest.mark.parametrize("rows, brief", [(8, True), (256, False)])
def test_what_has_little_to_do_with_memory_releases_before_it_waits(rows: int, brief: bool) -> None:
    """Two buffers of `rows` rows of 64 singles: 4 and 128 KiB."""
    made = legalise_for_gpu(softmax(rows, 64, scratch=False), EARLY)
    made.verify()
    assert made.body[brief] == Await() and (made.body[0] == Release()) is brief
    assert sum(isinstance(s, Release) for s in made.statements()) == 1
    staying = replace(softmax(rows, 64, scratch=False), persistent=True)
    assert (
        legalise_for_gpu(staying, EARLY).body[0] == Await()
    )  # its points release in a loop behind the one wait


def test_passes_over_a_row_that_store_are_released_before() -> None:
    """What loads again and stores in one loop has nothing behind it."""
    made = legalise_for_gpu(entry(BY_NAME["softmax"], True).scheduled.program, EARLY)
    made.verify()
    place = next(k for k, s in enumerate(made.body) if isinstance(s, Release))
    assert [type(s) for s in made.body[place + 1 :]] == [Loop]


def test_the_meaning_is_the_same() -> None:
    program = softmax(512, 64, scratch=False)
    given = [np.random.default_rng(0).standard_normal((512, 64)).astype(np.float32), None]
    plain, early = (run_program(legalise_for_gpu(program, t), given) for t in (GPU, EARLY))
    np.testing.assert_array_equal(plain[1], early[1])


def test_behind_whom_is_told() -> None:
    program = softmax(512, 64, scratch=False)
    made = legalise_for_gpu(program, replace(GPU, early_launch="any"))
    assert made.body[0] == Await(outside=True)
    variant = variants(made)[0]
    assert emit_triton(made, (), variant, "k0").outside
    assert not emit_triton(legalise_for_gpu(program, EARLY), (), variant, "k0").outside
    assert made.show() != legalise_for_gpu(program, EARLY).show()


@pytest.mark.parametrize(
    "body",
    [
        [LOAD, Await(), STORE],
        [STORE, Await()],
        [Check(TRUE, 1), Await(), STORE],
        [replace(ONCE, body=(LOAD,)), Await(), STORE],
        [Branch(TRUE, (Await(),)), STORE],
        [Branch(TRUE, (Await(),), (Await(),)), STORE],
        [replace(OFTEN, body=(Await(),)), STORE],
        [replace(ONCE, body=(Await(), STORE))],
        [Await(), Await(), STORE],
        [Release(), STORE],
        [Release(), Await(), STORE, Release()],
        [Await(), Release(), STORE, Release()],
        [replace(OFTEN, body=(Release(),)), Await(), STORE],
        [Branch(TRUE, (Release(),)), Await(), STORE],
        [Await(), replace(OFTEN, body=(Release(), STORE))],
        [Await(), Branch(TRUE, (Release(),)), STORE],
    ],
)
def test_what_could_run_ahead_is_refused(body: Sequence[Stmt]) -> None:
    program = TileProgram((BUFFER,), (), tuple(body))
    with pytest.raises(ValueError, match=r"front|behind"):
        program.verify()
    with pytest.raises(VerifyError, match=r"front|behind"):
        emit_triton(program, (), variants(program)[0], "k0")


@pytest.mark.parametrize(
    "body",
    [
        [Await(), STORE], [Release(), Await(), STORE], [Await(), replace(ONCE, body=(LOAD, Release(), STORE))],
        [STORE], [],
    ],
)  # fmt: skip
def test_what_cannot_is_taken(body: Sequence[Stmt]) -> None:
    program = TileProgram((BUFFER,), (), tuple(body))
    program.verify()
    assert emit_triton(program, (), variants(program)[0], "k0").text.count("gdc_wait") == (Await() in body)
