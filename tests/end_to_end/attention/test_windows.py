"""Masks made of data: loops that end where the data say, on either machine; results as eager's whatever the data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.end_to_end.attention.data_masks import (
    D,
    Function,
    documents,
    ended,
    flags,
    later,
    padding,
    places,
    received,
    right,
    scores,
    softmax,
)
from tests.support.fp64_rule import built, wrong
from tests.support.triton.absent_gpu import compiled
from tests.support.triton.harness import build, interpret, print_triton, same_as_interpreter
from torch import Tensor

from tilewright import accuracy
from tilewright.ir.dtype import i64
from tilewright.ir.expr import Axis, axis, integer
from tilewright.ir.program import Branch, Buffer, Load, Loop, TileProgram, Var, value_of
from tilewright.lower.variants import variants
from tilewright.schedule import mask_windows
from tilewright.target import preset


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are found whatever that costs."""
    monkeypatch.setattr(mask_windows, "MASKS", replace(mask_windows.MASKS, min_times_as_long=0))


def filled(q: Tensor, k: Tensor, v: Tensor, own: Tensor, ids: Tensor) -> Tensor:
    s = scores(q, k).masked_fill((own[..., :, None] != ids[..., None, :]).unsqueeze(-3), float("-inf"))
    return torch.softmax(s, -1).to(v.dtype) @ v


def added(q: Tensor, k: Tensor, v: Tensor, own: Tensor, ids: Tensor) -> Tensor:
    bias = torch.zeros(ids.shape[-1]).masked_fill(own[..., :, None] != ids[..., None, :], float("-inf"))
    return torch.softmax(scores(q, k) + bias.unsqueeze(-3), -1).to(v.dtype) @ v


def guarded(q: Tensor, k: Tensor, v: Tensor, own: Tensor, ids: Tensor) -> Tensor:
    s = scores(q, k)
    s = torch.where((own[..., :, None] == ids[..., None, :]).unsqueeze(-3), s, float("-inf"))
    m = s.amax(-1, keepdim=True)
    p = torch.exp(s - torch.where(m == float("-inf"), 0.0, m))
    total = p.sum(-1, keepdim=True)
    return (p / torch.where(total == 0, 1.0, total)).to(v.dtype) @ v


def windowed(q: Tensor, k: Tensor, v: Tensor, own: Tensor, ids: Tensor) -> Tensor:
    s = scores(q, k)
    i, j = places(s)
    return softmax(s, ((own[..., :, None] == ids[..., None, :]) & (j <= i) & (i - j < 70)).unsqueeze(-3), v)


def apart(q: Tensor, k: Tensor, v: Tensor, own: Tensor, ids: Tensor) -> Tensor:
    """Masks put on one after the other."""
    s = scores(q, k)
    i, j = places(s)
    s = torch.where((own[..., :, None] == ids[..., None, :]).unsqueeze(-3), s, float("-inf"))
    s = s.masked_fill(j > i, float("-inf")) + torch.where(i - j < 70, 0.0, float("-inf"))
    return torch.softmax(s, -1).to(v.dtype) @ v


def sigmoid(q: Tensor, k: Tensor, v: Tensor, own: Tensor, ids: Tensor) -> Tensor:
    same = (own[..., :, None] == ids[..., None, :]).unsqueeze(-3)
    return torch.where(same, torch.sigmoid(scores(q, k)), 0.0).to(v.dtype) @ v


def lengths(q: Tensor, k: Tensor, v: Tensor, count: Tensor) -> Tensor:
    s = scores(q, k)
    return softmax(s, (torch.arange(s.shape[-1]) < count[:, None])[:, None, None], v)


def ahead(q: Tensor, k: Tensor, v: Tensor, first: Tensor, count: Tensor) -> Tensor:
    """From a place per row on, up to a number per batch."""
    s = scores(q, k)
    _, j = places(s)
    return softmax(s, ((j >= first[:, :, None]) & (j < count[:, None, None]))[:, None], v)


BY_DOCUMENT: dict[str, Function] = {
    f.__name__: f for f in (documents, filled, added, guarded, windowed, apart, sigmoid)
}


def given(
    function: Function, length: int, kind: str, dtype: torch.dtype = torch.half, heads: int = 3
) -> list[Tensor]:
    """Inputs of a program over two sequences; `kind` says how the data lie."""
    made = [torch.randn(2, heads, length, D).to(dtype) for _ in range(3)]
    if function is lengths:
        return [*made, torch.tensor([0 if kind == "empty" else length, length // 3])]
    if function is ahead:
        first = torch.arange(length).repeat(2, 1) - 20
        return [*made, first if kind == "sorted" else first.flip(1), torch.tensor([length, length // 2])]
    if function is padding:
        return [*made, torch.arange(length)[None] < torch.tensor([[length // 2], [length]])]
    if function is flags:
        count = -(-length // 64)
        return [*made, torch.rand(count, count) < 0.4 if kind != "sorted" else torch.eye(count).bool()]
    ids = torch.randint(0, 4, (2, length))
    if kind == "sorted":
        ids = ids.sort(-1).values
    own = ids.clone()
    if kind == "empty":
        own[:, length // 3 : length // 3 + max(1, length // 2)] = -1
    return [*made, own, ids]


FUNCTIONS = [*BY_DOCUMENT.values(), later, lengths, ahead, padding, flags]


KINDS = ("sorted", "unsorted", "empty")


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_on_a_gpu(function: Function) -> None:
    made = compiled(function, given(function, 200, "sorted"))
    assert any(ended(k.program) for k in made.kernels)
    for kind in KINDS:
        right(made, function, given(function, 200, kind))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_on_a_cpu(function: Function) -> None:
    draws = [tuple(given(function, 700, kind, torch.float32)) for kind in KINDS]
    made = built(function, draws[0], "inside")
    assert any(ended(s.program) for s in made.trace["schedule"])  # pyright: ignore
    assert not wrong(function, made, draws)


@pytest.mark.parametrize("function", [documents, lengths], ids=lambda f: f.__name__)
def test_any_length(function: Function) -> None:
    """Lengths that are multiples of nothing, in one program."""
    first = given(function, 150, "unsorted", heads=8)
    made = compiled(function, first, [(2,), (2,), (2,), *([(1,), (1,)] if function is documents else [()])])
    assert any(ended(k.program) for k in made.kernels)
    for length in (2, 17, 129, 200):
        right(made, function, given(function, length, "sorted", heads=8))


@pytest.mark.parametrize("way", ["gpu", "cpu"])
def test_tiles_of_other_documents_are_not_touched(way: str) -> None:
    """NaN among their values would show."""
    inputs = given(filled, 512, "sorted", torch.half if way == "gpu" else torch.float32)
    inputs[3] = inputs[4] = (torch.arange(512) // 128).repeat(2, 1)
    inputs[2][:, :, :128] = torch.nan
    if way == "gpu":
        (ours, *_), _ = compiled(filled, inputs).run(inputs)
    else:
        ours = built(filled, tuple(inputs), "inside")(*inputs)
        assert isinstance(ours, Tensor)
    assert ours[:, :, :128].isnan().all()
    assert not ours[:, :, 128:].isnan().any()


def test_lengths_bound_loops_of_their_own() -> None:
    """No kernel before, and tiles that are full run without masks."""
    inputs = given(lengths, 300, "sorted")
    made = compiled(lengths, inputs)
    (kernel,) = made.kernels
    assert len(ended(kernel.program)) >= 2


def test_far_lengths_do_not_wrap() -> None:
    inputs = given(lengths, 200, "sorted")
    inputs[3] = torch.tensor([torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min + 1])
    right(compiled(lengths, inputs), lengths, inputs)


def test_layers_share_windows() -> None:
    def twice(q: Tensor, k: Tensor, v: Tensor, own: Tensor, ids: Tensor) -> Tensor:
        return later(later(q, k, v, own, ids), k, v, own, ids)

    inputs = given(later, 200, "sorted")
    made = compiled(twice, inputs)
    assert len(made.kernels) == 3
    right(made, twice, inputs)


def padded(q: Tensor, k: Tensor, v: Tensor, own: Tensor, ids: Tensor, real: Tensor) -> Tensor:
    """Documents, then flags of keys that are real."""
    s = torch.where((own[..., :, None] == ids[..., None, :]).unsqueeze(-3), scores(q, k), float("-inf"))
    s = (0.5 * s).masked_fill(~real[:, None, None, :], float("-inf"))
    return torch.softmax(s, -1).to(v.dtype) @ v


def test_windows_of_masks_put_on_one_after_the_other() -> None:
    """They are those of all masks together: a run of keys of another kind, and one that is not real, are left out."""
    inputs = given(filled, 512, "sorted", heads=9)
    inputs[3] = (torch.arange(512) // 256).repeat(2, 1)
    inputs[4] = inputs[3].clone()
    real = (torch.arange(512) % 256 < 128).repeat(2, 1)
    made = compiled(padded, [*inputs, real])
    (search, *_) = made.kernels
    assert len(search.kernel.inputs) == 3, "both ids and the flags"
    inputs[2][:, :, 128:256] = torch.nan
    inputs[2][:, :, 384:] = torch.nan
    (ours, *_), _ = made.run([*inputs, real])
    assert not ours.isnan().any()
    wanted = inputs[2].nan_to_num(0.0)
    torch.testing.assert_close(ours, padded(*inputs[:2], wanted, *inputs[3:], real), rtol=2e-3, atol=2e-3)


def test_only_where_it_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_windows, "MASKS", replace(mask_windows.MASKS, min_times_as_long=1 << 20))
    inputs = given(documents, 200, "sorted")
    made = compiled(documents, inputs)
    assert not any(ended(k.program) for k in made.kernels)
    right(made, documents, inputs)


def test_masks_of_scores_are_no_windows() -> None:
    def steep(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k)
        return torch.softmax(torch.where(s > 0, s, float("-inf")), -1).to(v.dtype) @ v

    inputs = given(documents, 200, "sorted")[:3]
    made = compiled(steep, inputs)
    assert not any(ended(k.program) for k in made.kernels)
    assert any("mask" in note.text for k in made.kernels for note in k.notes)
    right(made, steep, inputs)


def test_nothing_is_trusted_under_exact() -> None:
    inputs = given(documents, 200, "sorted")
    made = compiled(documents, inputs, trim="exact")
    assert not any(ended(k.program) for k in made.kernels)


@pytest.mark.parametrize("function", [documents, lengths], ids=lambda f: f.__name__)
def test_printed(function: Function, tmp_path: Path) -> None:
    """In Triton's interpreter, and as machine code whose loops are pipelined."""
    inputs = given(function, 200, "sorted")
    made = compiled(function, inputs)
    _, jobs = made.run(inputs)
    for job, outcome in zip(jobs, interpret(tmp_path, jobs), strict=True):
        same_as_interpreter(job, outcome, rtol=2e-3, atol=2e-3)
    program = made.kernels[-1].program
    assert not variants(program)[0].wide
    facts = build(tmp_path / "code", print_triton(program, (), preset("sm_90"), variants(program)[0], "k0"))
    assert "wgmma" in facts.text and "cp.async" in facts.text and not facts.facts.spills


def test_loops_end_at_scalars() -> None:
    a, b = Axis("a", integer(8)), Axis("b", integer(8))
    many, one = Var(0, i64, (a,)), Var(1, i64)
    memory = Buffer("p0", i64, integer(8))

    def until(v: Var) -> TileProgram:
        inner = (Load(v, memory, axis(a) if v.axes else integer(0)), Loop(b, integer(0), value_of(v), 1, ()))
        return TileProgram((memory,), (), (Loop(a, integer(0), integer(8), 8, inner),))

    until(one).verify()
    with pytest.raises(ValueError, match="ends at a block"):
        until(many).verify()


def test_steps_between_the_ends_are_jumped_over_on_a_cpu() -> None:
    """Documents in two runs each: NaN among the values of what lies between would show."""
    inputs = given(filled, 512, "sorted", torch.float32)
    inputs[3] = inputs[4] = torch.tensor([0, 1, 0, 2]).repeat_interleave(128).repeat(2, 1)
    inputs[2][:, :, 128:256] = torch.nan
    made = built(filled, tuple(inputs), "inside")
    assert any(isinstance(x, Branch) for s in made.trace["schedule"] for x in s.program.statements())  # pyright: ignore
    ours = made(*inputs)
    assert isinstance(ours, Tensor)
    assert ours[:, :, 128:256].isnan().all()
    ours[:, :, 128:256], inputs[2][:, :, 128:256] = 0.0, 0.0
    want = filled(*inputs)
    want[:, :, 128:256] = 0.0
    torch.testing.assert_close(ours, want)


@pytest.mark.parametrize("way", ["gpu", "cpu"])
def test_statistics_of_columns(way: str) -> None:
    draws = [given(filled, 400, kind, torch.half if way == "gpu" else torch.float32) for kind in KINDS]
    if way == "cpu":
        made = built(received, tuple(draws[0]), "inside")
        assert not wrong(received, made, [tuple(d) for d in draws])
        return
    device = compiled(received, draws[0])
    for draw in draws:
        results, _ = device.run(draw)
        for ours, eager, exact in zip(
            results, received(*draw), accuracy.in_float64(received)(*draw), strict=True
        ):
            verdict = accuracy.compare(ours, eager, exact)
            assert verdict.passed, verdict
