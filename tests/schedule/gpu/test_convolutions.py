"""Convolutions as products of matrices: what is proposed means the same, whatever windows, layouts and borders are."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from tests.support.lowered import agree
from tests.support.normal_graph import capture
from tests.support.one_kernel import one_kernel
from torch import Tensor

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.emit.triton.kernel import emit_triton
from tilewright.interp import EXACT, exact_random, run_graph
from tilewright.interp.algebra import Array
from tilewright.ir.form import FormStep
from tilewright.ir.graph import Graph
from tilewright.ir.kernel import Scheduled
from tilewright.ir.program import Dot, is_binding, walk_statements
from tilewright.lower.legalise.gpu import legalise_for_gpu
from tilewright.options import Options
from tilewright.runtime.cuda.kernels import usual
from tilewright.schedule.scheduler import Solution
from tilewright.schedule.solver import Solver, replay
from tilewright.target import preset

Program = tuple[Callable[..., object], Sequence[Tensor]]


def halves(*shape: int, nchw: bool = False, dtype: torch.dtype = torch.float16) -> Tensor:
    made = torch.empty(shape, dtype=dtype)
    return made.to(memory_format=torch.channels_last) if len(shape) == 4 and not nchw else made


def conv(*window: object, of: Callable[..., Tensor] = F.conv2d) -> Callable[..., Tensor]:
    """A convolution with bias and ReLU; `window` is stride, padding, dilation, groups."""
    return lambda x, w, b: F.relu(of(x, w, b, *window))


def residual(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, w, b, 1, 1) + y)


def scaled(x: Tensor, w: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, w, None, 1, 1) * scale[:, None, None] + shift[:, None, None])


def gated(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, w, None, 1, 1)) * F.conv2d(x, v, None, 1, 1)


def uneven(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.conv2d(F.pad(x, (0, 1, 2, 0)), w, b))


def batched(x: Tensor, w: Tensor) -> Tensor:
    return torch.vmap(lambda a, b: F.conv2d(a, b, None, 1, 1))(x, w)


def concatenated(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(torch.cat([x, y], 1), w, None, 1, 1)


def image(n: int, c: int, h: int, w: int, o: int, *window: int, nchw: bool = False) -> Sequence[Tensor]:
    return halves(n, c, h, w, nchw=nchw), halves(o, c, *window, nchw=nchw), halves(o)


PROGRAMS: dict[str, Program] = {
    "3x3": (conv(1, 1), image(2, 32, 4, 5, 20, 3, 3)),
    "3x3 with strides": (conv(2, 1), image(2, 32, 7, 7, 32, 3, 3)),
    "1x1": (conv(), image(2, 24, 5, 5, 20, 1, 1)),
    "1x1 with strides": (conv(2), image(2, 24, 5, 5, 20, 1, 1)),
    "stem": (conv(2, 3), image(1, 3, 12, 11, 32, 7, 7)),
    "stem of lines": (conv(2, 3), image(1, 3, 12, 11, 32, 7, 7, nchw=True)),
    "lines": (conv(1, 1), image(2, 16, 4, 5, 32, 3, 3, nchw=True)),
    "mixed": (conv(1, 1), (halves(2, 16, 4, 5), halves(32, 16, 3, 3, nchw=True), halves(32))),
    "holes": (conv(1, 2, 2), image(1, 16, 5, 6, 32, 3, 3)),
    "groups": (conv(1, 1, 1, 2), (halves(1, 64, 4, 5), halves(40, 32, 3, 3), halves(40))),
    "uneven borders": (uneven, image(1, 16, 5, 5, 32, 3, 3)),
    "an image in a window": (conv(1, 2), image(2, 16, 2, 3, 32, 5, 5)),
    "one place": (conv(1, 1), image(20, 16, 1, 1, 32, 3, 3)),
    "24 channels": (conv(1, 1), image(1, 24, 4, 5, 32, 3, 3)),
    "29 channels": (conv(1, 1), image(1, 29, 4, 5, 29, 3, 3)),
    "long strides": (conv(3), image(2, 32, 8, 8, 32, 2, 2)),
    "a line": (conv(1, 1, of=F.conv1d), (halves(2, 16, 9), halves(32, 16, 3), halves(32))),
    "taps alone": (conv(1, 8, of=F.conv1d), (halves(2, 1, 30), halves(16, 1, 17), halves(16))),
    "a volume": (conv(1, 1, of=F.conv3d), (halves(1, 4, 3, 4, 3), halves(32, 4, 3, 3, 3), halves(32))),
    "bf16": (conv(1, 1), [t.bfloat16() for t in image(1, 32, 4, 5, 32, 3, 3)]),
    "residual": (residual, (*image(1, 16, 4, 5, 32, 3, 3), halves(1, 32, 4, 5))),
    "scale and shift": (scaled, (*image(1, 16, 4, 5, 32, 3, 3), halves(32))),
    "gate": (gated, (halves(1, 16, 4, 5), halves(32, 16, 3, 3), halves(32, 16, 3, 3))),
    "batch": (batched, (halves(2, 1, 16, 4, 5).contiguous(), halves(2, 32, 16, 3, 3))),
    "concatenation": (concatenated, (halves(1, 16, 4, 4), halves(1, 16, 4, 4), halves(32, 32, 3, 3))),
}


def proposed(graph: Graph, machine: str = "sm_90") -> tuple[Solver, list[Solution]]:
    """The solver, and two of the proposals, which have different tiles."""
    solver = Solver(preset(machine), Options())
    found: dict[object, Solution] = {}
    for solution in solver.proposals(one_kernel(graph), graph.layouts):
        found.setdefault(solution.schedule.changed(stages=1, order=0, warps=4, descriptors=False), solution)
    tiles = list(found.values())
    return solver, tiles[:: max(1, len(tiles) - 1)][:2]


def loops(made: Scheduled) -> int:
    """Loops with products in them."""
    found = [s for s in made.program.loops() if not is_binding(s)]
    return sum(any(isinstance(x, Dot) for x in walk_statements(s.body)) for s in found)


def is_same(run: Callable[..., object], given: Sequence[Tensor], machine: str = "sm_90") -> None:
    """All that is proposed gives what the graph gives, exactly, has one loop, and is made again from its schedule."""
    graph = capture(run, given)
    inputs: list[Array] = [exact_random(tuple(t.shape), 10 + k) for k, t in enumerate(given)]
    wanted: list[object] = list(run_graph(graph, inputs, algebra=EXACT))
    solver, found = proposed(graph, machine)
    assert found
    for solution in found:
        made = solver.solve(one_kernel(graph), graph.layouts, solution.schedule)
        assert agree(graph, made, inputs, wanted), str(solution.schedule)
        assert loops(made) <= 1, "borders are masks, and cut no loop"
        assert made.seconds == pytest.approx(solution.seconds)
        again = replay(
            one_kernel(graph), graph.layouts, solution.schedule, solver.target, Options(), NO_HINTS
        )
        assert again == made.program


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_mean_the_same(name: str) -> None:
    is_same(*PROGRAMS[name])


@pytest.mark.parametrize("machine", ["sm_80", "gfx942"])
def test_on_other_machines(machine: str) -> None:
    is_same(*PROGRAMS["3x3 with strides"], machine)


def test_a_batch_may_be_unknown() -> None:
    given = image(3, 16, 4, 5, 32, 3, 3, nchw=True)
    graph = capture(conv(1, 1), given, [{0: "n"}, {}, {}])
    inputs: list[Array] = [exact_random(tuple(t.shape), 10 + k) for k, t in enumerate(given)]
    wanted: list[object] = list(run_graph(graph, inputs, algebra=EXACT))
    solver, found = proposed(graph)
    assert found
    for solution in found:
        made = solver.solve(one_kernel(graph), graph.layouts, solution.schedule)
        assert agree(graph, made, inputs, wanted), str(solution.schedule)


def test_single_precision_has_no_proposals() -> None:
    graph = capture(conv(1, 1), [t.float() for t in image(1, 32, 4, 5, 32, 3, 3)])
    assert proposed(graph)[1] == []


def test_steps_are_in_one_tap_where_channels_allow_it() -> None:
    _, found = proposed(capture(conv(1, 1), image(8, 64, 14, 14, 64, 3, 3)))
    steps = [s.schedule.form_steps for s in found]
    assert all(FormStep("merge_sides") in s and s[-1].name == "walk_sums" for s in steps)
    _, few = proposed(capture(conv(1, 1), image(8, 24, 14, 14, 64, 3, 3)))
    assert few and all(s.schedule.form_steps[-1].name == "merge_sides" for s in few)


def test_elements_that_are_loaded_alone_have_no_stages() -> None:
    _, found = proposed(capture(conv(2, 3), image(8, 3, 64, 64, 64, 7, 7)))
    assert found and all(s.schedule.launch.stages == 1 for s in found)


def printed(graph: Graph) -> str:
    solver, found = proposed(graph)
    program = solver.solve(one_kernel(graph), graph.layouts, found[0].schedule).program
    return emit_triton(legalise_for_gpu(program, solver.target), (), usual(program)[0], "k0").text


@pytest.mark.parametrize(
    ("program", "run"),
    [
        ((conv(1, 1), image(8, 24, 14, 14, 64, 3, 3)), 8),
        ((conv(1, 1), image(8, 116, 14, 14, 116, 3, 3)), 4),
        ((conv(2, 1), image(8, 64, 14, 14, 64, 3, 3)), 64),
    ],
)
def test_copies_are_as_wide_as_channels_allow(program: Program, run: int) -> None:
    """What quotients and rests hide from the language's compiler is told it: else each half is loaded alone."""
    text = printed(capture(*program))
    told = re.findall(r"tl.max_contiguous\(.*, \[1, (\d+)\]\), \[1, (\d+)\]\)", text)
    assert told and all(int(length) == run for _, length in told)


def test_a_step_of_one_tap_has_scalar_borders() -> None:
    text = printed(capture(conv(1, 1), image(8, 64, 14, 14, 64, 3, 3)))
    (loop,) = re.findall(r"    for (a\d+) in tl.range\(0, 9, num_stages=\d\):", text)
    assert f"{loop} // 3" in text and f"{loop} % 3" in text, "a tap is a number of the step"
