"""Masks of data with holes: loops over lists of the tiles that are seen at all, found by kernels before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.end_to_end.attention import data_masks as programs
from tests.end_to_end.attention.data_masks import (
    documents,
    flags,
    listed,
    padding,
    received,
    right,
    scores,
    softmax,
)
from tests.support.triton.absent_gpu import Device, compiled
from tests.support.triton.harness import build, interpret, print_triton, same_as_interpreter
from torch import Tensor

from tilewright import accuracy
from tilewright.form.classes import make_form
from tilewright.interp.program import run_program
from tilewright.ir.dtype import bool_
from tilewright.ir.expr import walk
from tilewright.ir.program import Compute, Load, Loop, TileProgram, Update, expressions
from tilewright.ir.schedule import Schedule
from tilewright.lower.lower import lower
from tilewright.lower.variants import variants
from tilewright.schedule import mask_windows
from tilewright.target import preset

D = programs.D
BLOCK = 128
COUNTS = "some"
"""The op that counts the tiles of a list."""


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are made whatever that costs."""
    monkeypatch.setattr(mask_windows, "MASKS", replace(mask_windows.MASKS, min_times_as_long=0))
    monkeypatch.setattr(mask_windows, "MASKS", replace(mask_windows.MASKS, min_times_as_large=0))


def blocked(q: Tensor, k: Tensor, v: Tensor, some: Tensor) -> Tensor:
    """A table of flags per batch and block."""
    s = scores(q, k)
    seen = some.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return softmax(s, seen[:, None, : s.shape[-2], : s.shape[-1]], v)


def each(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """A flag per score."""
    return softmax(scores(q, k), seen, v)


def in_turn(q: Tensor, k: Tensor, v: Tensor, own: Tensor, ids: Tensor) -> Tensor:
    """Documents first, the diagonal afterwards."""
    s = scores(q, k).masked_fill((own[..., :, None] != ids[..., None, :]).unsqueeze(-3), float("-inf"))
    i, j = programs.places(s)
    return torch.softmax(s.masked_fill(j > i, float("-inf")), -1).to(v.dtype) @ v


def matrices(length: int, heads: int = 2, batch: int = 1) -> list[Tensor]:
    return [torch.randn(batch, heads, length, D).half() for _ in range(3)]


def table(kind: str, length: int, batch: int = 1) -> Tensor:
    n = -(-length // BLOCK)
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    made = {
        "checkerboard": (i + j) % 2 == 0,
        "random": (torch.rand(n, n) < 0.3) | (i == j),
        "nothing": torch.zeros(n, n).bool(),
        "all": torch.ones(n, n).bool(),
        "one row": (i == 1).expand(n, n),
    }[kind]
    return torch.stack([made.roll(b, 0) for b in range(batch)])


def ids_of(kind: str, length: int, batch: int = 1) -> Tensor:
    i = torch.arange(length)
    made = {"interleaved": i % 3, "repeated": i // 64 % 3, "sorted": i * 5 // length, "own": i}[kind]
    return made.repeat(batch, 1)


def counted(made: Device, inputs: list[Tensor]) -> Tensor:
    """How many tiles the lists of the first such kernel name, by row of blocks."""
    _, jobs = made.run(inputs)
    for k, job in zip(made.kernels, jobs, strict=True):
        names = [op.name for op in k.kernel.ops]
        if COUNTS in names:
            contents = run_program(job.program, job.inputs, job.sizes)
            return torch.from_numpy(contents[len(k.kernel.inputs) + names.index(COUNTS)])
    raise AssertionError("no list")


@pytest.mark.parametrize("length", [300, 512])
def test_blocks_of_flags(length: int) -> None:
    made = compiled(blocked, [*matrices(length, batch=2), table("random", length, 2)])
    assert listed(made.kernels[-1].program)
    for kind in ("checkerboard", "random", "nothing", "all", "one row"):
        right(made, blocked, [*matrices(length, batch=2), table(kind, length, 2)])


def test_documents_in_any_order() -> None:
    made = compiled(documents, [*matrices(300), ids_of("sorted", 300), ids_of("sorted", 300)])
    assert listed(made.kernels[-1].program)
    for kind in ("interleaved", "repeated", "sorted", "own"):
        own = ids_of(kind, 300)
        right(made, documents, [*matrices(300), own, own])
    own[:, 70:250] = -1
    right(made, documents, [*matrices(300), own, ids_of("own", 300)])


def test_any_flags() -> None:
    """Sinks and a window, given as data; then any."""
    i, j = torch.arange(330)[:, None], torch.arange(330)[None, :]
    some = (j <= i) & ((i - j < 40) | (j < 4))
    made = compiled(each, [*matrices(330), some])
    right(made, each, [*matrices(330), some])
    right(made, each, [*matrices(330), torch.rand(330, 330) < 0.01])
    assert counted(made, [*matrices(330), torch.zeros(330, 330).bool()]).max() == 0


def test_any_length() -> None:
    """Lengths that are multiples of nothing, in one program."""
    inputs = [*matrices(150, heads=8), ids_of("repeated", 150), ids_of("repeated", 150)]
    made = compiled(documents, inputs, [(2,), (2,), (2,), (1,), (1,)])
    assert listed(made.kernels[-1].program)
    for length in (2, 17, 129, 200):
        own = ids_of("repeated", length)
        right(made, documents, [*matrices(length, heads=8), own, own])


def test_hidden_tiles_are_not_touched() -> None:
    """NaN among their values would show."""
    inputs = [*matrices(512), table("checkerboard", 512)]
    inputs[2][:, :, BLOCK : 2 * BLOCK] = torch.nan
    (ours, *_), _ = compiled(blocked, inputs).run(inputs)
    for block in range(4):
        part = ours[:, :, block * BLOCK : (block + 1) * BLOCK]
        assert part.isnan().all() if block % 2 else not part.isnan().any()


def test_lists_name_what_is_seen() -> None:
    inputs = [*matrices(512), table("checkerboard", 512)]
    made = compiled(blocked, inputs)
    (loop, *_) = listed(made.kernels[-1].program)
    (step,) = (x for x in loop.body if isinstance(x, Loop))
    counts = counted(made, inputs)
    assert counts.tolist() == [2 * BLOCK // step.tile] * len(counts)


def test_masks_in_a_row_are_one() -> None:
    """Tiles behind the diagonal are not listed either, though another op hides them."""
    own = torch.zeros(1, 512).long()
    made = compiled(in_turn, [*matrices(512), own, own])
    counts = counted(made, [*matrices(512), own, own])
    assert counts.tolist() == sorted(counts.tolist()) and counts[0] < counts[-1]
    for kind in ("interleaved", "repeated"):
        own = ids_of(kind, 512)
        right(made, in_turn, [*matrices(512), own, own])


def masked(loop: Loop) -> bool:
    """Whether a loop tests anything per element."""
    inner = TileProgram((), (), loop.body).statements()
    roots = [e for s in inner if not isinstance(s, Update) or s.mask for e in expressions(s)]
    tests = [x for r in roots for x in walk(r) if x.op in ("eq", "ne", "lt", "le") and x.dtype is bool_]
    return any(x.op != "eq" or not x.args[0].dtype.is_float for x in tests)


def test_tiles_that_are_seen_whole_are_not_masked() -> None:
    for function, inputs in (
        (documents, [*matrices(512), ids_of("sorted", 512), ids_of("sorted", 512)]),
        (blocked, [*matrices(512), table("random", 512)]),
        (in_turn, [*matrices(512), ids_of("sorted", 512), ids_of("sorted", 512)]),
    ):
        whole, part = listed(compiled(function, inputs).kernels[-1].program)  # pyright: ignore[reportArgumentType]
        assert [masked(whole), masked(part)] == [False, True] or function is blocked
        read = [
            x for s in TileProgram((), (), whole.body).statements() for e in expressions(s) for x in walk(e)
        ]
        assert not any(x.op == "where" and x.args[0].op == "var" for x in read if function is blocked)


def test_keys_alone() -> None:
    """One list serves all rows."""
    inputs = [*matrices(300, batch=2), torch.rand(2, 300) < 0.5]
    inputs[3][0, 64:192] = False
    made = compiled(padding, inputs)
    assert listed(made.kernels[-1].program) and len(counted(made, inputs)) == 2
    right(made, padding, inputs)


def test_tiles_of_other_sizes_use_the_same_list() -> None:
    """A kernel that got less memory than it asked for has shorter steps."""
    inputs = [*matrices(300, batch=2), table("random", 300, 2)]
    made = compiled(blocked, inputs)
    last = made.kernels[-1]
    assert isinstance(last.schedule, Schedule)
    (loop, *_) = listed(last.program)
    (step,) = (x for x in loop.body if isinstance(x, Loop))
    form = make_form(last.kernel, made.cover.layouts)
    results, jobs = made.run(inputs)
    length, old = step.axis.extent, step.tile
    like = [p for p in last.schedule.tiling.classes if (p.axis.extent, p.tile, p.chunk) == (length, old, 0)]
    streamed = like[0].axis
    for tile in (step.tile // 2, 2 * step.tile):
        classes = tuple(
            replace(p, tile=tile) if p.axis == streamed else p for p in last.schedule.tiling.classes
        )
        program = lower(form, last.schedule.changed(classes=classes))
        assert bool(listed(program)) == (tile < step.tile)
        made_again = run_program(program, jobs[-1].inputs, jobs[-1].sizes)[-1]
        wanted = results[0].reshape(-1)
        torch.testing.assert_close(torch.from_numpy(made_again), wanted, rtol=2e-3, atol=2e-3, equal_nan=True)


def test_columns_of_rows_that_see_nothing() -> None:
    """A single such row makes every column of its batch NaN, whichever tiles are listed."""
    own = ids_of("repeated", 400, 2)
    made = compiled(received, [*matrices(400, batch=2), own, own.clone()])
    assert all(listed(k.program) for k in made.kernels[-2:])
    blind = own.clone()
    blind[0, 150] = -1
    for queries in (own, blind):
        inputs = [*matrices(400, batch=2), queries, own]
        results, _ = made.run(inputs)
        exact = accuracy.in_float64(received)(*inputs)
        for ours, eager, wanted in zip(results, received(*inputs), exact, strict=True):
            verdict = accuracy.compare(ours, eager, wanted)
            assert verdict.passed, verdict


def test_places_are_compared_by_windows() -> None:
    """What is only compared in order is taken for one run of places."""
    own = torch.arange(300)[None]
    inputs = [*matrices(300), own, own]
    made = compiled(programs.later, inputs)
    assert not any(listed(k.program) for k in made.kernels) and programs.ended(made.kernels[-1].program)


def test_lists_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_windows, "MASKS", replace(mask_windows.MASKS, min_times_as_large=1 << 20))
    inputs = [*matrices(512), table("random", 512)]
    made = compiled(blocked, inputs)
    assert not any(listed(k.program) for k in made.kernels)
    right(made, blocked, inputs)


def test_nothing_is_trusted_under_exact() -> None:
    inputs = [*matrices(300), table("random", 300)]
    assert not any(listed(k.program) for k in compiled(blocked, inputs, trim="exact").kernels)


@pytest.mark.parametrize("function", [blocked, documents, flags], ids=lambda f: f.__name__)
def test_printed(function: programs.Function, tmp_path: Path) -> None:
    """In Triton's interpreter, and as machine code that has the operands of several steps under way."""
    own = ids_of("repeated", 300)
    beside = {blocked: [table("random", 300)], documents: [own, own], flags: [torch.rand(5, 5) < 0.4]}[
        function
    ]
    inputs = [*matrices(300), *beside]
    made = compiled(function, inputs)
    assert len(listed(made.kernels[-1].program)) == 2
    _, jobs = made.run(inputs)
    for job, outcome in zip(jobs, interpret(tmp_path, jobs), strict=True):
        same_as_interpreter(job, outcome, rtol=2e-3, atol=2e-3)
    last = made.kernels[-1]
    assert isinstance(last.schedule, Schedule)
    form = make_form(last.kernel, made.cover.layouts)
    program = lower(form, last.schedule.changed(stages=4))
    source = print_triton(program, (), preset("sm_90"), variants(program)[0], "k0")
    facts = build(tmp_path / "code", source)
    assert "wgmma" in facts.text and not facts.facts.spills
    assert max(map(int, _waits(facts.text))) >= 4, "two operands of two further steps"


def _waits(text: str) -> list[str]:
    """How many groups of copies may be under way at each wait."""
    return [line.split()[-1].rstrip(";") for line in text.splitlines() if "cp.async.wait_group" in line]


def test_numbers_of_tiles_are_carried() -> None:
    """A step loads the number of the next one, so that its operands need not wait for a number."""
    program = compiled(blocked, [*matrices(512), table("random", 512)]).kernels[-1].program
    for loop in listed(program):
        first = next(s for s in loop.body if isinstance(s, Compute))
        (update,) = (s for s in loop.body if isinstance(s, Update))
        assert first.expr.value == update.vars[0].id


def test_notes_say_what_lists_take() -> None:
    made = compiled(blocked, [*matrices(512), table("random", 512)])
    last = made.kernels[-1]
    (loop, *_) = listed(last.program)
    (size,) = {load.buffer.size for load in loop.body if isinstance(load, Load)}
    assert [n.text for n in last.notes] == [
        f"{{0}}, {{1}}, {{2}}: loops over the tiles that a list names ({size} numbers)"
    ]
