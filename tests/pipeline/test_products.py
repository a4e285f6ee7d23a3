"""Products with what stands behind them, and attention: kernels where a clock says so, else the library's."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tests.support.triton.absent_gpu import compiled
from torch import Tensor

from tilewright.ir.graph import LibraryCall
from tilewright.ir.kernel import LAID, PADDED
from tilewright.library.convolution_layout import ConvolutionOfChannels
from tilewright.library.offers.offer import channels_last
from tilewright.pipeline.backends.cuda import CudaBackend
from tilewright.pipeline.product_ways import Proposal
from tilewright.pipeline.replay_trial import Contest, ReplayContestant, ReplayTrial
from tilewright.runtime.store.cache import ContentStore
from tilewright.schedule.product_table import (
    FastestProduct,
    MeasuredBlocks,
    ProductShape,
    ProductTable,
    blocks_of,
)


class Clock:
    """Kernels of our own take `ours` seconds, the last schedule of each less; a library's way takes one."""

    def __init__(self, ours: float | None) -> None:
        self.ours, self.asked = ours, 0
        self.timed: list[ReplayContestant] = []

    def __call__(self, trial: ReplayTrial, contests: Sequence[Contest]) -> list[list[float | None]]:
        self.asked += len(contests)
        self.timed += [way for ways in contests for way in ways[1:]]
        found: list[list[float | None]] = []
        for ways in contests:
            times = [None if self.ours is None else self.ours - n / 1000 for n in range(len(ways) - 1)]
            found.append([1.0, *times])
        return found


@pytest.fixture
def clock(request: pytest.FixtureRequest) -> Iterator[Clock]:
    made = Clock(request.param)
    with (
        mock.patch.object(CudaBackend, "replay_clock", lambda backend, device: lambda run: 0.0),
        mock.patch.object(ReplayTrial, "__call__", lambda trial, contests: made(trial, contests)),
    ):
        yield made


def pick_whole(proposed: Sequence[Proposal], count: int) -> list[Proposal]:
    """Those that sum in one kernel."""
    return [p for p in proposed if p.way.parts == 1][:count]


def halves(*shape: int) -> Tensor:
    return torch.randn(shape).half() / 4


def mlp(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, a)) * F.linear(x, b), c) + x


def heads(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
    rows, width = x.shape
    a, b, c = (F.linear(x, w).view(1, rows, 2, width // 2).transpose(1, 2) for w in (q, k, v))
    return F.linear(F.scaled_dot_product_attention(a, b, c).transpose(1, 2).reshape(rows, width), o) + x


PROGRAMS: dict[str, tuple[Callable[..., Tensor], Sequence[tuple[int, ...]]]] = {
    "mlp": (mlp, ((40, 64), (96, 64), (96, 64), (64, 96))),
    "attention": (heads, ((40, 64), *[(64, 64)] * 4)),
    "bmm": (lambda x, y: torch.relu(torch.bmm(x, y)), ((3, 33, 40), (3, 40, 50))),
}


@pytest.mark.parametrize("clock", [0.5], indirect=True)
@pytest.mark.parametrize("name", PROGRAMS)
def test_they_are_kernels_with_the_schedules_that_won(name: str, clock: Clock) -> None:
    """(`compiled` refuses library calls.)"""
    torch.manual_seed(0)
    run, shapes = PROGRAMS[name]
    inputs = [halves(*shape) for shape in shapes]
    made = compiled(run, inputs, contractions="modelled")
    assert clock.asked
    results, _ = made.run(inputs)
    torch.testing.assert_close(results[0], run(*inputs), rtol=4e-3, atol=4e-3)
    chosen = [k for k in made.kernels if k.seconds is not None and 0.4 < k.seconds < 0.5]
    assert chosen, "a schedule that was timed is taken"


@pytest.mark.parametrize("clock", [0.5], indirect=True)
def test_attention_that_has_a_kernel_keeps_it(clock: Clock) -> None:
    """So small that the model gave all of it one kernel before a clock is asked."""
    torch.manual_seed(0)
    inputs = [halves(32, 4, 32), halves(96, 32)]

    def run(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = F.linear(x, w).view(32, 4, 3, 2, 16).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v)

    made = compiled(run, inputs, contractions="modelled")
    results, _ = made.run(inputs)
    torch.testing.assert_close(results[0], run(*inputs), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("clock", [0.5], indirect=True)
def test_a_long_sum_of_few_rows_in_parts(clock: Clock) -> None:
    """Two kernels: the parts, and what merges them with all that stands behind."""
    torch.manual_seed(0)
    inputs = [halves(16, 512), halves(32, 512), halves(32)]

    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w, b))

    def parts(proposed: Sequence[Proposal], count: int) -> list[Proposal]:
        return [p for p in proposed if p.way.parts > 1][:count]

    with mock.patch("tilewright.pipeline.products.pick_varied", parts):
        made = compiled(run, inputs, contractions="modelled")
    results, _ = made.run(inputs)
    torch.testing.assert_close(results[0], run(*inputs), rtol=4e-3, atol=4e-3)
    first, last = made.kernels
    assert first.seconds is not None and 0.4 < first.seconds < 0.5
    (between,) = first.kernel.outputs
    assert between in last.kernel.inputs and between.dtype.name == "f32"


@pytest.mark.parametrize("clock", [0.5], indirect=True)
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "rows last"])
def test_few_channels_that_are_padded(last: bool, clock: Clock) -> None:
    """A kernel for each operand that is padded, and one that multiplies; the same schedule is taken again."""
    torch.manual_seed(0)
    inputs = [halves(2, 3, 9, 8), halves(16, 3, 3, 3), halves(16)]
    if last:
        inputs = [t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for t in inputs]

    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.relu(F.conv2d(x, w, b, 2, 1))

    def padded(proposed: Sequence[Proposal], count: int) -> list[Proposal]:
        return [p for p in proposed if p.way.operands == PADDED][:count]

    kept = ContentStore(None)
    with (
        mock.patch("tilewright.pipeline.products.pick_varied", padded),
        mock.patch.object(CudaBackend, "clock", lambda backend, device: lambda run: 0.0),
        mock.patch("tilewright.pipeline.phases.ConvolutionTimer", ChannelsAreFaster),
        mock.patch("tests.support.triton.absent_gpu.ContentStore", lambda root: kept),
    ):
        made = compiled(run, inputs, contractions="modelled")
        again = compiled(run, inputs, contractions="modelled")
    names = [[op.name for op in k.kernel.ops] for k in made.kernels]
    assert names[:2] == [["pad_channels"], ["pad_channels"]] and "convolution" in names[2]
    assert clock.asked == 1 and [str(k.schedule) for k in again.kernels] == [
        str(k.schedule) for k in made.kernels
    ]
    results, _ = made.run(inputs)
    torch.testing.assert_close(results[0], run(*inputs), rtol=4e-3, atol=4e-3)


def laid(proposed: Sequence[Proposal], count: int) -> list[Proposal]:
    return [p for p in proposed if p.way.operands == LAID][:count]


def by_channel(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, w, b, 1, 1, 1, x.shape[1]))


@pytest.mark.parametrize("clock", [0.5], indirect=True)
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_of_windows_that_are_laid(clock: Clock, *, frozen: bool) -> None:
    """A kernel that lays them, where they are not frozen; the same schedule is taken again."""
    torch.manual_seed(0)
    inputs = [halves(2, 32, 9, 8).to(memory_format=torch.channels_last), halves(32, 1, 3, 3), halves(32)]
    run = (lambda x: by_channel(x, *inputs[1:])) if frozen else by_channel
    given = inputs[:1] if frozen else inputs
    kept = ContentStore(None)
    with (
        mock.patch("tilewright.pipeline.products.pick_varied", laid),
        mock.patch("tests.support.triton.absent_gpu.ContentStore", lambda root: kept),
    ):
        made = compiled(run, given, contractions="modelled")
        again = compiled(run, given, contractions="modelled")
    names = [[op.name for op in k.kernel.ops] for k in made.kernels]
    assert ([["lay_windows"]] if not frozen else []) == names[:-1] and "convolution" in names[-1]
    assert made.kernels[-1].schedule.memory.own_copies
    for way in clock.timed:  # what runs once is not timed
        assert (len(way.kernels), len(way.prepared_once)) == ((1, 1) if frozen else (2, 0))
    assert (
        clock.timed
        and clock.asked == 1
        and [str(k.schedule) for k in again.kernels] == [str(k.schedule) for k in made.kernels]
    )
    results, _ = made.run(given)
    torch.testing.assert_close(results[0], by_channel(*inputs), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("clock", [0.99, None], indirect=True, ids=["as fast", "not timed"])
def test_the_library_keeps_what_is_no_faster(clock: Clock) -> None:
    run, shapes = PROGRAMS["mlp"]
    with pytest.raises(AssertionError, match="a library call is left"):
        compiled(run, [halves(*shape) for shape in shapes], contractions="modelled")
    assert clock.asked


@pytest.mark.parametrize("clock", [0.5], indirect=True)
def test_without_seconds_nothing_is_timed(clock: Clock) -> None:
    run, shapes = PROGRAMS["mlp"]
    with pytest.raises(AssertionError, match="a library call is left"):
        compiled(run, [halves(*shape) for shape in shapes], contractions="modelled", tune_seconds=0)
    assert not clock.asked


@pytest.mark.parametrize("clock", [0.5], indirect=True)
def test_blocks_that_were_measured_before_are_timed_first(clock: Clock) -> None:
    """Those that a model takes for slower, among as few kernels as there is time for."""
    wanted = MeasuredBlocks((128, 128), 16, 8, 1)
    shape = ProductShape("contraction", 2, 1, False, 1, "kkn", 1, 256, 512, 256, 256 * 256)
    table = ProductTable((FastestProduct(shape, wanted, 8.0, 10.0, "somewhere"),))
    inputs = [halves(256, 256), halves(512, 256)]
    for known in (ProductTable(), table):
        with (
            mock.patch("tilewright.pipeline.products.product_table", lambda target, known=known: known),
            mock.patch("tilewright.pipeline.products.usable_cores", lambda: 2),
        ):
            compiled(lambda x, w: x @ w.t(), inputs, contractions="modelled", tune_seconds=1)
    before, after = (
        [blocks_of(schedule) for way in ways for schedule in way.schedules.values()]
        for ways in (clock.timed[: len(clock.timed) // 2], clock.timed[len(clock.timed) // 2 :])
    )
    assert len(before) == len(after) == 2
    assert not any(b.are_like(wanted) for b in before) and after[0].are_like(wanted)


@pytest.mark.parametrize("clock", [0.5], indirect=True)
def test_a_second_process_measures_nothing(clock: Clock, tmp_path: Path) -> None:
    run, shapes = PROGRAMS["mlp"]
    inputs = [halves(*shape) for shape in shapes]
    kept = ContentStore(tmp_path)
    with mock.patch("tests.support.triton.absent_gpu.ContentStore", lambda root: kept):
        first = compiled(run, inputs, contractions="modelled")
        before = clock.asked
        again = compiled(run, inputs, contractions="modelled")
    assert clock.asked == before > 0
    assert [str(k.schedule) for k in again.kernels] == [str(k.schedule) for k in first.kernels]


@pytest.mark.parametrize("clock", [0.5], indirect=True)
def test_rows_that_are_not_known(clock: Clock) -> None:
    """One kernel for all of them."""
    torch.manual_seed(0)
    run, shapes = PROGRAMS["mlp"]
    x, *weights = (halves(*shape) for shape in shapes)
    with mock.patch("tilewright.pipeline.products.pick_varied", pick_whole):
        made = compiled(run, [x, *weights], [(0,), (), (), ()], contractions="modelled")
    assert clock.asked and len(made.kernels) == 2 and not any(k.buckets for k in made.kernels)
    for rows in (40, 7, 130):
        given = [halves(rows, 64), *weights]
        results, _ = made.run(given)
        torch.testing.assert_close(results[0], run(*given), rtol=4e-3, atol=4e-3)


class ChannelsAreFaster:
    """In the place of a timer of convolutions."""

    def __init__(self, *_: object) -> None: ...

    def seconds(self, call: LibraryCall, *_: object) -> float:
        return 0.5 if isinstance(call.function, ConvolutionOfChannels) else 1.0

    def pass_seconds(self, *_: object) -> float:
        return 0.01

    def __call__(self, *_: object) -> bool:
        return False


@pytest.mark.parametrize("clock", [0.5], indirect=True)
@pytest.mark.parametrize(("channels", "copies"), [(16, 3), (3, 1)], ids=["wide", "few"])
def test_convolutions_of_images_whose_columns_lie_innermost(channels: int, copies: int, clock: Clock) -> None:
    """Images of few channels are read as they lie, and their weights with them."""
    torch.manual_seed(0)
    inputs = [halves(2, channels, 9, 7), halves(16, channels, 3, 3), halves(16), halves(8, 16, 3, 3)]

    def run(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return F.relu(F.conv2d(F.relu(F.conv2d(x, a, b, padding=1)), c, stride=2))

    with (
        mock.patch.object(CudaBackend, "clock", lambda backend, device: lambda run: 0.0),
        mock.patch("tilewright.pipeline.phases.ConvolutionTimer", ChannelsAreFaster),
        mock.patch("tilewright.pipeline.products.pick_varied", pick_whole),
    ):
        made = compiled(run, inputs, contractions="modelled")
    assert len(made.kernels) == 2 + copies
    between = next(
        v
        for v in made.kernels[-1].kernel.inputs
        if v.shape[1:] == made.kernels[-2].kernel.outputs[0].shape[1:]
    )
    assert made.cover.layouts[between].strides == channels_last(between.shape)
    results, _ = made.run(inputs)
    torch.testing.assert_close(results[0], run(*inputs), rtol=4e-3, atol=4e-3)
    assert results[0].is_contiguous()


@pytest.mark.parametrize("clock", [0.5], indirect=True)
def test_a_choice_that_fails_costs_speed_alone(clock: Clock) -> None:
    run, shapes = PROGRAMS["mlp"]
    wrong = mock.patch("tilewright.pipeline.phases.choose_products", side_effect=KeyError("x"))
    with wrong, pytest.warns(RuntimeWarning, match=r"\[products\] KeyError.* left out"):
        with pytest.raises(AssertionError, match="a library call is left"):
            compiled(run, [halves(*shape) for shape in shapes], contractions="modelled")
