"""Choices between like expressions become one, and blocks that lie inside their tensor need no masks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.triton.absent_gpu import compiled
from tests.support.triton.harness import Job, interpret, print_triton, same_as_interpreter
from torch import Tensor

from tilewright.form.merge_selects import merge_selects
from tilewright.ir.dtype import bool_, f32, i64
from tilewright.ir.expr import Axis, axis, call, cast, const, read, walk, where
from tilewright.ir.program import Branch, Load
from tilewright.ir.sizes import dims
from tilewright.lower.variants import Variant
from tilewright.target import preset


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((first * c - second * s, second * c + first * s), -1)


def _turned_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = torch.cat((cos, cos), -1)[:, None], torch.cat((sin, sin), -1)[:, None]
    return x * angle[0] + torch.cat((-x[..., half:], x[..., :half]), -1) * angle[1]


def _rolled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((x[..., 3:], x[..., :3]), -1) * 2


def _gated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


SIZES = ((5, 7, 32), (3, 9, 130), (2, 8, 128))


def _inputs(size: tuple[int, int, int], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    angle = torch.rand(size[0], size[2] // 2)
    return [torch.randn(size).to(dtype), angle.cos().to(dtype), angle.sin().to(dtype)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("run", [_rotary, _turned_half, _rolled, _gated])
@pytest.mark.parametrize("dynamic", [False, True])
def test_results(run: Callable[..., Tensor], size: tuple[int, int, int], dynamic: bool) -> None:
    inputs = _inputs(size, torch.float32)
    device = compiled(run, inputs, [(0, 1), (0,), (0,)] if dynamic else ())
    (made,), _ = device.run(inputs)
    torch.testing.assert_close(made, run(*inputs))


@pytest.mark.parametrize(("run", "loads"), [(_rotary, 4), (_turned_half, 4), (_rolled, 1)])
def test_each_tensor_is_loaded_once_from_each_place(run: Callable[..., Tensor], loads: int) -> None:
    (kernel,) = compiled(run, _inputs((64, 32, 128), torch.float16)).kernels
    assert len([s for s in kernel.program.statements() if isinstance(s, Load)]) == loads


def test_a_merged_load_is_as_wide_as_the_others() -> None:
    """A product with a condition's number tells Triton how far neighbours stay neighbours; a choice does not."""
    device = compiled(_rotary, _inputs((64, 32, 128), torch.float16))
    (kernel,) = device.kernels
    text = print_triton(kernel.program, device.symbols, preset("sm_90"), Variant(True, False), "k").text
    assert text.count("tl.load(") == 4
    assert not [line for line in text.splitlines() if "tl.load(" in line and "tl.where" in line]


def test_a_choice_that_saves_no_load_stays() -> None:
    a = Axis("i", dims.integer(8))
    low = call("lt", axis(a), dims.integer(4))
    one, two = read(0, (axis(a),), f32), read(1, (axis(a),), f32)
    assert merge_selects(where(low, one, const(0.0, f32))) is None
    assert merge_selects(where(low, one, two)) is None
    moved = read(0, (dims.sub(axis(a), dims.integer(4)),), f32)
    made = merge_selects(where(low, call("mul", one, two), call("mul", moved, two)))
    assert made is not None and len({x for x in walk(made) if x.op == "read"}) == 2


def test_a_sum_with_one_sign_changed_keeps_its_rounding() -> None:
    """a - b is a + (-b), which rounds alike: the choice is between signs of the factor with fewer axes."""
    a, b = Axis("i", dims.integer(8)), Axis("j", dims.integer(8))
    low = call("lt", axis(a), dims.integer(4))
    x, y = (read(0, (dims.add(axis(b), dims.integer(n)),), f32) for n in (0, 8))
    s, t = (read(1, (dims.add(axis(a), dims.integer(n)),), f32) for n in (0, 8))
    made = merge_selects(where(low, call("sub", x, call("mul", y, s)), call("add", y, call("mul", x, t))))
    assert made is not None and made.op == "add"
    signs = [c for c in walk(made) if c.op == "where"]
    assert [tuple(v.value for v in c.args[1:]) for c in signs] == [(-1, 1)]


def test_numbers_of_conditions_have_bounds() -> None:
    a = Axis("i", dims.integer(8))
    number = cast(call("lt", axis(a), dims.integer(4)), i64)
    assert number.args[0].dtype is bool_
    assert dims.int_range(dims.mul(number, dims.integer(6))) == (0, 6)


@pytest.mark.parametrize("dynamic", [True, False])
def test_blocks_inside_a_tensor_of_unknown_size_have_no_masks(dynamic: bool) -> None:
    inputs = [torch.empty(64, 4096, dtype=torch.float16), torch.empty(4096, dtype=torch.float16)]

    def shifted(x: Tensor, b: Tensor) -> Tensor:
        return torch.relu(x + b)

    (kernel,) = compiled(shifted, inputs, [(0, 1), (0,)] if dynamic else ()).kernels
    branches = [s for s in kernel.program.statements() if isinstance(s, Branch)]
    assert len(branches) == dynamic
    loads = [s for s in kernel.program.statements() if isinstance(s, Load)]
    assert len([s for s in loads if s.mask is None]) == 2
    assert len([s for s in loads if s.mask is not None]) == 2 * dynamic


def test_no_block_of_short_rows_is_whole() -> None:
    inputs = [torch.empty(64, 32, 126, dtype=torch.float16)]
    (kernel,) = compiled(lambda x: x.transpose(0, 1) + 1, inputs, [(0, 1)]).kernels
    assert not [s for s in kernel.program.statements() if isinstance(s, Branch)]


@pytest.mark.parametrize("size", [(3, 8, 128), (3, 5, 126)])
def test_printed_choices_mean_the_same(size: tuple[int, int, int], tmp_path: Path) -> None:
    jobs: list[Job] = []
    for run in (_rotary, _turned_half, _rolled):
        for dynamic in ([], [(0, 1), (0,), (0,)]):
            inputs = _inputs(size, torch.float16)
            jobs += compiled(run, inputs, dynamic).run(inputs)[1]
    for job, outcome in zip(jobs, interpret(tmp_path, jobs), strict=True):
        same_as_interpreter(job, outcome, rtol=1e-3, atol=1e-3)
