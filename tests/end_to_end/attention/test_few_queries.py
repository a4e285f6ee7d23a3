"""Kernels for few queries: each key and value is read once, and what one query sums is summed closely."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.attention.workloads import (
    Attention,
    HeavyHitter,
    Keyformer,
    Margins,
    RoCo,
    Sizes,
    causal_mask,
)
from tests.end_to_end.attention.split_keys import parts, repeated, right, statements
from tests.support.triton.absent_gpu import Device, compiled
from torch import Tensor

from tilewright.ir.program import Dot, Load
from tilewright.ir.schedule import Role, Schedule
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.host import number


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mask of the last query, which hides nothing where it is the only one."""
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + causal_mask(q, k)
    return torch.softmax(s.float(), -1).to(v.dtype) @ v


def inputs(heads: int, kv: int, queries: int, keys: int, dtype: torch.dtype, depth: int = 16) -> list[Tensor]:
    shapes = ((heads, queries), (kv, keys), (kv, keys))
    return [torch.randn(1, h, n, depth).to(dtype) for h, n in shapes]


def loads(made: Device, kernel: int = 0) -> list[Load]:
    """Loads of operands of more than a row, in loops and outside."""
    return [
        s
        for s in statements(made.kernels[kernel].program.body)
        if isinstance(s, Load) and len(s.var.axes) > 1
    ]


@pytest.mark.parametrize("keys", [1024, 1000])
def test_a_mask_that_hides_nothing_costs_no_pass(keys: int, tmp_path: Path) -> None:
    given = inputs(8, 2, 1, keys, torch.float16)
    made = compiled(masked, given, launch=0.0)
    assert parts(made) > 1 and len(made.kernels) == 2
    read = [s.buffer.name for s in loads(made)]
    steps = 1 if keys == 1024 else 2  # of whole tiles, and of the last one
    assert all(read.count(p) <= steps for p in read)
    assert not any("runs after" in str(n) for k in made.kernels for n in k.notes)
    right(made, masked, given, tmp_path)


CORES = {"h2o": HeavyHitter, "roco": RoCo, "keyformer": Keyformer, "corm": Margins}


def given_to(core: type[Attention], keys: int, dtype: torch.dtype, queries: int = 1) -> list[Tensor]:
    name = "keyformer" if core is Keyformer else "h2o"
    return list(Sizes(queries, 4, 16, batch=2, keys=keys, kv_heads=2).inputs(name, dtype=dtype))


@pytest.mark.parametrize(
    ("name", "keys", "dtype"),
    [
        ("h2o", 4096, torch.float16),
        ("h2o", 1000, torch.float32),
        ("roco", 4097, torch.float16),
        ("keyformer", 1024, torch.float32),
        ("corm", 4000, torch.float16),
    ],
)
def test_statistics_of_one_query_are_made_of_the_scores(
    name: str, keys: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Keys are read once: the parts leave scores behind, rounded where the program rounds them, and states."""
    core = CORES[name]
    given = given_to(core, keys, dtype)
    made = compiled(core().eval(), given, launch=0.0)
    assert parts(made) > 1 and len(made.kernels) == 3
    readers = [k for k in made.kernels if made.graph.inputs[1] in k.kernel.inputs]
    assert len(readers) == 1
    left = [v for v in readers[0].kernel.outputs if (dims.static(v.numel) or 0) >= 8 * keys]
    assert [v.dtype.bytes for v in left] == [given[0].element_size()]
    right(made, core().eval(), given, tmp_path)


def test_statistics_of_any_number_of_keys() -> None:
    core = HeavyHitter().eval()
    made = compiled(core, given_to(HeavyHitter, 4096, torch.float16), [(), (1,), (1,)], launch=0.0)
    assert parts(made) > 1
    for keys in (1, 17, 129, 1000, 2048):
        right(made, core, given_to(HeavyHitter, keys, torch.float16))


def test_scores_of_several_queries_are_not_left_behind() -> None:
    """They are more than the statistics."""
    given = given_to(HeavyHitter, 1024, torch.float16, queries=4)
    made = compiled(HeavyHitter().eval(), given, launch=0.0)
    largest = max(dims.static(v.numel) or 0 for k in made.kernels for v in k.kernel.outputs)
    assert largest <= 8 * 1024


def chosen(made: Device, given: list[Tensor]) -> Device:
    """With the programs that serve these sizes."""
    sizes = made.sizes(given)
    kernels = [
        replace(k, program=next((b.program for b in k.buckets if number(b.condition, sizes)), k.program))
        for k in made.kernels
    ]
    return replace(made, kernels=kernels)


def dots(made: Device) -> list[Dot]:
    return [s for k in made.kernels for s in statements(k.program.body) if isinstance(s, Dot)]


@pytest.mark.parametrize(
    ("core", "kv", "dtype", "machine"),
    [
        (HeavyHitter, 4, torch.float32, "sm_90"),
        (HeavyHitter, 1, torch.float32, "sm_90"),
        (HeavyHitter, 1, torch.float16, "sm_90"),
        (Keyformer, 1, torch.float32, "sm_90"),
        (HeavyHitter, 4, torch.float32, "sm_80"),
        (HeavyHitter, 1, torch.float32, "sm_80"),
    ],
)
def test_any_number_of_queries(
    core: type[Attention], kv: int, dtype: torch.dtype, machine: str, tmp_path: Path
) -> None:
    """One query, a few and many have programs of their own; those of a few sum what they multiply where no matrix unit
    takes it."""
    module = core().eval()
    name = "keyformer" if core is Keyformer else "h2o"

    def some(queries: int, keys: int) -> list[Tensor]:
        return list(Sizes(queries, 4, 16, keys=keys, kv_heads=kv).inputs(name, dtype=dtype))

    free = [(1,), (1,), (1,), *([(2, 3)] if core is Keyformer else [])]
    made = compiled(module, some(256, 256), free, machine=machine)
    assert len(made.kernels) == 2 and parts(made) == 1
    for queries, keys in ((1, 1), (1, 130), (2, 65), (9, 70), (16, 16), (17, 33)):
        given = some(queries, keys)
        there = chosen(made, given)
        few = queries <= (8 if kv == 4 else 2)
        assert (machine == "sm_80" and few) is not bool(dots(there))
        right(there, module, given, tmp_path if (queries, keys) in ((2, 65), (9, 70)) else None)


@pytest.mark.parametrize(("queries", "keys"), [(2, 1024), (4, 1000), (3, 1031)])
def test_queries_of_heads_that_share_keys_are_rows_of_one_product(
    queries: int, keys: int, tmp_path: Path
) -> None:
    given = inputs(8, 2, queries, keys, torch.float16)
    made = compiled(masked, given, launch=0.0)
    program = made.kernels[0].program
    assert dims.static(dims.prod(g.extent for g in program.grid)) == 2 * parts(made)
    schedule = made.kernels[0].schedule
    assert isinstance(schedule, Schedule)
    heights = {p.tile for p in schedule.tiling.classes if p.role is Role.GRID}
    assert heights == {1, 16}
    right(made, masked, given, tmp_path)
