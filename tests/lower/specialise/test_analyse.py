"""Which programs have specialised warps, what is decided for these, and that schedules say so."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.triton.absent_gpu import compiled
from tests.support.triton.specialised import CHANGES, attention, specialised
from torch import Tensor
from torch.nn import functional as F

from tilewright.errors import IllegalSchedule
from tilewright.interp.program import run_program
from tilewright.ir.dtype import f16
from tilewright.ir.program import Dot, Load, Loop, Stmt, TileProgram, Update, rewrite_body
from tilewright.ir.text.schedule import parse
from tilewright.lower.specialise.analyse import specialise
from tilewright.lower.specialise.plan import STRIP_ROWS
from tilewright.options import Options
from tilewright.schedule.solver import Solver
from tilewright.target import preset


def heads(
    length: int = 256, depth: int = 128, count: int = 64, dtype: torch.dtype = torch.float16
) -> list[Tensor]:
    return [torch.zeros(1, count, length, depth, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("change", CHANGES)
def test_attention_is_understood(change: str) -> None:
    program, _ = specialised(attention(CHANGES[change]), heads(512))
    plan = specialise(program)
    assert plan.strips == 2 and plan.tile[plan.rows] == STRIP_ROWS
    assert (
        plan.query_ring.slots == 2
        and plan.query_ring.block == (STRIP_ROWS, 128)
        and not plan.query_ring.turned
    )
    assert plan.key_ring.slots == plan.value_ring.slots == program.stages
    assert plan.key_ring.turned and not plan.value_ring.turned
    assert plan.copied is not None and plan.copied.ring.block == (STRIP_ROWS, 128)
    assert plan.shared_bytes <= 232448
    multiplies = [k.results is not None for k in plan.loops]
    assert multiplies == {"full": [True], "causal": [True, True], "window": [True] * 3, "soft cap": [True],
                          "alibi": [True]}[change]  # fmt: skip
    for k in plan.loops:
        assert all(not isinstance(s, Dot) for s in (*k.between, *k.rescale))
        assert len(k.rescale) == (k.results is not None)


@pytest.mark.parametrize(("rows", "ways"), [(64, 0), (65, 2), (256, 2)])
def test_each_warp_group_has_rows(rows: int, ways: int) -> None:
    q, k, v = heads(rows)[0], *heads(512)[1:]
    device = compiled(attention(CHANGES["full"]), [q, k, v])
    (kernel,) = device.kernels
    solver = Solver(preset("sm_90"), Options(contractions="inside"))
    assert len(solver.specialised(kernel.kernel, device.cover.layouts)) == ways


def test_a_distance_without_sign_is_no_wide_number() -> None:
    """|i - j| is at most as large as i or j: indices stay within 32 bits, which descriptors need."""

    def near(s: Tensor, heads: int) -> Tensor:
        i = torch.arange(s.shape[-1])
        return s - 0.1 * (i[None, :] - i[:, None]).abs().float()

    program, _ = specialised(attention(near), heads(512))
    assert specialise(program).strips == 2


def test_what_torch_attends_to_is_understood() -> None:
    """Weights of halves, and a division behind the product: nothing else than attention that is written out."""
    for causal in (False, True):

        def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = causal) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        plan = specialise(specialised(attend, heads(512))[0])
        for k in plan.loops:
            assert k.results is not None and k.results.a.dtype is k.results.b.dtype is f16


def test_what_is_computed_of_scores_never_reads_results() -> None:
    program, _ = specialised(attention(CHANGES["causal"]), heads())
    plan = specialise(program)
    for k in plan.loops:
        assert k.results is not None
        known = {v.id for s in k.between for v in getattr(s, "vars", ())}
        assert k.results.acc.id not in known
        assert all(isinstance(s, Update) and s.vars == (k.results.acc,) for s in k.rescale)


def test_a_loop_that_may_be_empty_is_known_to_be() -> None:
    first, last = specialise(specialised(attention(CHANGES["causal"]), heads())[0]).loops
    assert not first.sure and last.sure and last.single


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("keys", [64, 128])
def test_heads_of_64(dtype: torch.dtype, keys: int) -> None:
    program, _ = specialised(attention(CHANGES["full"]), heads(512, 64, dtype=dtype), keys)
    plan = specialise(program)
    assert plan.key_ring.block == plan.value_ring.block == (keys, 64) and plan.query_ring.block == (
        STRIP_ROWS,
        64,
    )


def test_shared_heads_and_biases() -> None:
    q, k, v = heads(256, 64, 4)
    grouped, _ = specialised(attention(CHANGES["causal"]), [q, k[:, :2].clone(), v[:, :2].clone()])
    assert len(specialise(grouped).loops) == 2
    biased, _ = specialised(attention(CHANGES["full"]), [q, k, v, torch.zeros(1, 4, 256, 256).half()])
    (loop,) = specialise(biased).loops
    assert [s.buffer.name for s in loop.between if isinstance(s, Load)] == ["p0"]


def test_sizes_that_are_not_known() -> None:
    inputs = heads(320, 64)
    device = compiled(attention(CHANGES["full"]), inputs, [(2,)] * 3)
    (kernel,) = device.kernels
    solver = Solver(preset("sm_90"), Options(contractions="inside"))
    found = solver.specialised(kernel.kernel, device.cover.layouts)
    assert found
    program = solver.solve(kernel.kernel, device.cover.layouts, found[0].schedule).program
    assert [k.sure for k in specialise(program).loops] == [False, False]


def test_it_means_what_its_statements_mean() -> None:
    """The interpreter knows nothing of warps."""
    program, _ = specialised(attention(CHANGES["causal"]), heads(256, 64, 1))
    torch.manual_seed(0)
    given = [torch.randn(1, 1, 256, 64).half() for _ in range(3)]
    *_, made = run_program(program, [*(t.numpy().reshape(-1) for t in given), None], {})
    q, k, v = (t.float() for t in given)
    right = torch.softmax(CHANGES["causal"](q @ k.mT / 8.0, 1), -1) @ v
    np.testing.assert_allclose(made.astype(np.float32), right.numpy().reshape(-1), atol=2e-3)


def test_a_schedule_says_so_and_is_read_back() -> None:
    device = compiled(attention(CHANGES["full"]), heads())
    (kernel,) = device.kernels
    solver = Solver(preset("sm_90"), Options(contractions="inside"))
    for found in solver.specialised(kernel.kernel, device.cover.layouts):
        text = str(found.schedule)
        assert " descriptors warp_specialised " in text
        assert parse(text, found.form.classes()) == found.schedule
        read = solver.read_solution(kernel.kernel, device.cover.layouts, text, 1.0)
        assert read.schedule == found.schedule


@pytest.mark.parametrize("machine", ["sm_80", "sm_100", "gfx942"])
def test_other_machines_have_none(machine: str) -> None:
    device = compiled(attention(CHANGES["full"]), heads(), machine=machine)
    solver = Solver(preset(machine), Options(contractions="inside"))
    assert not solver.specialised(device.kernels[0].kernel, device.cover.layouts)


# --- what is refused ---------------------------------------------------------------


def without_values(s: Stmt) -> tuple[Stmt, ...] | None:
    if isinstance(s, Loop) and any(isinstance(x, Dot) for x in s.body):
        last = max(k for k, x in enumerate(s.body) if isinstance(x, Dot))
        return (replace(s, body=(*s.body[:last], *s.body[last + 1 :])),)
    return None


def results_read_late(s: Stmt) -> tuple[Stmt, ...] | None:
    """The rescaling behind the product that it is to come before."""
    if isinstance(s, Loop) and any(isinstance(x, Dot) for x in s.body):
        last = max(k for k, x in enumerate(s.body) if isinstance(x, Dot))
        acc = next(x for x in (s.body[last],) if isinstance(x, Dot)).acc
        moved = [x for x in s.body if isinstance(x, Update) and x.vars == (acc,)]
        rest = [x for x in s.body if x not in moved]
        return (replace(s, body=(*rest, *moved)),)
    return None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (without_values, "no loop has a product of scores and a product of what is made of them"),
        (results_read_late, "read, or changed otherwise than before the product"),
    ],
)
def test_bodies_that_are_not_understood(change: Callable[[Stmt], tuple[Stmt, ...] | None], why: str) -> None:
    program, _ = specialised(attention(CHANGES["full"]), heads())
    with pytest.raises(IllegalSchedule, match=re.escape(why)):
        specialise(replace(program, body=rewrite_body(program.body, change)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"warps": 4}, "4 warps for 2 strips of rows"),
        ({"aligned": False}, "no call has aligned addresses"),
        ({"over": (3,)}, "stores over what it loads"),
    ],
)
def test_programs_that_are_not_understood(change: dict[str, object], why: str) -> None:
    program, _ = specialised(attention(CHANGES["full"]), heads())
    changed: TileProgram = replace(program, **change)  # pyright: ignore[reportArgumentType]
    with pytest.raises(IllegalSchedule, match=why):
        specialise(changed)


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param(heads(256, 80), id="a head of no power of two"),
        pytest.param([t.float() for t in heads()], id="singles"),
    ],
)
def test_nothing_is_proposed_for_other_operands(inputs: list[Tensor]) -> None:
    device = compiled(attention(CHANGES["full"]), inputs)
    solver = Solver(preset("sm_90"), Options(contractions="inside"))
    for kernel in device.kernels:
        assert not solver.specialised(kernel.kernel, device.cover.layouts)


def test_nothing_is_proposed_for_a_plain_product() -> None:
    device = compiled(lambda x, w: torch.relu(x @ w), [torch.zeros(256, 256).half()] * 2)
    solver = Solver(preset("sm_90"), Options(contractions="inside"))
    assert not any(solver.specialised(k.kernel, device.cover.layouts) for k in device.kernels)
