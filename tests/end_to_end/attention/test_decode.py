"""Few queries and many keys: reductions over keys in parts side by side, heads that share keys in one product."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.end_to_end.attention.split_keys import parts, repeated, right, statements
from tests.support.triton.absent_gpu import compiled
from tests.support.triton.harness import build, print_triton
from torch import Tensor

from tilewright.ir.program import Dot, Load, Loop
from tilewright.ir.sizes import dims
from tilewright.lower.variants import variants
from tilewright.target import preset

D = 16


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return torch.softmax(s.float(), -1).to(v.dtype) @ v


def aligned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last query sees all keys."""
    s = (q @ repeated(k, q.shape[1]).transpose(-1, -2)).float()
    i, j = torch.arange(s.shape[-2])[:, None] + (s.shape[-1] - s.shape[-2]), torch.arange(s.shape[-1])
    p = torch.softmax(torch.where(j <= i, s, float("-inf")), -1)
    return p.to(v.dtype) @ repeated(v, q.shape[1])


def guarded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows that see nothing would be 0."""
    return F.scaled_dot_product_attention(q, k, v, torch.arange(k.shape[2])[None] > 3)


def inputs(heads: int, kv: int, queries: int, keys: int, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    shapes = ((heads, queries), (kv, keys), (kv, keys))
    return [torch.randn(1, h, n, D, dtype=torch.float32).to(dtype) for h, n in shapes]


@pytest.mark.parametrize(
    ("function", "heads", "kv", "queries", "keys"),
    [
        (plain, 4, 4, 1, 1024),
        (plain, 8, 2, 1, 1000),
        (plain, 4, 4, 16, 1023),
        (aligned, 8, 2, 3, 2049),
        (guarded, 4, 4, 2, 8000),
    ],
)  # fmt: skip
def test_parts_are_merged(
    function: Callable[..., object], heads: int, kv: int, queries: int, keys: int, tmp_path: Path
) -> None:
    given = inputs(heads, kv, queries, keys)
    made = compiled(function, given, launch=0.0)
    assert parts(made) > 1 and len(made.kernels) == 2
    right(made, function, given, tmp_path)


@pytest.mark.parametrize("function", [plain, aligned])
def test_any_number_of_keys(function: Callable[..., object]) -> None:
    made = compiled(function, inputs(8, 2, 1, 1500), [(), (2,), (2,)], launch=0.0)
    assert parts(made) > 1 and len(made.kernels) == 2
    for keys in (1, 2, 17, 127, 129, 1000, 4097):
        right(made, function, inputs(8, 2, 1, keys))


def test_parts_that_see_nothing() -> None:
    """Early queries see only keys of the first part; with more queries than keys, some see none."""
    given = inputs(2, 2, 5, 8192)
    i, j = torch.arange(5)[:, None], torch.arange(8192)

    def early(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = torch.where(j < i, (q @ k.transpose(-1, -2)).float(), float("-inf"))
        return torch.softmax(s, -1).to(v.dtype) @ v

    made = compiled(early, given, launch=0.0)
    assert parts(made) > 1
    results, _ = made.run(given)
    assert results[0][:, :, 0].isnan().all() and not results[0][:, :, 1:].isnan().any()
    torch.testing.assert_close(results[0], early(*given), equal_nan=True, rtol=2e-2, atol=2e-3)


def test_heads_of_a_group_share_one_product() -> None:
    """Keys and values are loaded once for all heads of a group, which are the rows of the product."""
    made = compiled(plain, inputs(16, 2, 1, 4096))
    program = made.kernels[0].program
    loops = [s for s in statements(program.body) if isinstance(s, Loop)]
    (loop,) = [s for s in loops if dims.static(dims.sub(s.stop, s.start)) != s.tile]
    inside = statements(loop.body)
    assert sum(isinstance(x, Dot) for x in inside) == sum(isinstance(x, Load) for x in inside) == 2
    points = dims.static(dims.prod(g.extent for g in program.grid))
    assert points == 2 * parts(made)


def test_many_rows_are_not_cut() -> None:
    made = compiled(plain, inputs(32, 32, 512, 512))
    assert parts(made) == 1 and len(made.kernels) == 1


def test_short_rows_are_not_cut() -> None:
    made = compiled(plain, inputs(4, 4, 1, 100))
    assert parts(made) == 1


@pytest.mark.parametrize(("kv", "queries"), [(32, 1), (8, 1), (32, 16)])
def test_machine_code(kv: int, queries: int, tmp_path: Path) -> None:
    given = [
        torch.empty(1, h, n, 128, dtype=torch.float16) for h, n in ((32, queries), (kv, 8192), (kv, 8192))
    ]
    made = compiled(plain, given, contractions="modelled")
    first, second = (k.program for k in made.kernels)
    texts: list[str] = []
    for program in (first, second):
        source = print_triton(program, (), preset("sm_90"), variants(program)[0], "k0")
        built = build(tmp_path / str(len(texts)), source)
        assert not built.facts.spills
        texts.append(built.text)
    assert re.search(r"mma", texts[0])
    copies = [int(n, 16) for n in re.findall(r"cp\.async\.c[ag][^\n]*, 0x(\w+)", texts[0])]
    assert len(copies) >= 4 and set(copies) == {16}
    assert (dims.static(dims.prod(g.extent for g in first.grid)) or 0) >= 100
