"""Heads that share keys and values, however a program says so, and documents given as data, in kernels for a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.end_to_end.attention.split_keys import inner
from tests.support.triton.absent_gpu import Device, compiled
from torch import Tensor

from tilewright import accuracy
from tilewright.ir.expr import axes_of

Function = Callable[..., Tensor]
HEADS, SHARED, D = 8, 2, 16


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = (q @ k.transpose(-1, -2) / math.sqrt(D)).float()
    i, j = torch.arange(s.shape[-2])[:, None] + (s.shape[-1] - s.shape[-2]), torch.arange(s.shape[-1])
    return torch.softmax(torch.where(j <= i, s, float("-inf")), -1).to(v.dtype) @ v


def expanded(x: Tensor) -> Tensor:
    batch, few, places, depth = x.shape
    shared = x[:, :, None, :, :].expand(batch, few, HEADS // few, places, depth)
    return shared.reshape(batch, HEADS, places, depth)


def transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.reshape(1, x.shape[2], -1, D).transpose(1, 2) for x in (q, k, v))
    return causal(q, expanded(k), expanded(v)).transpose(1, 2)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    split = q.reshape(1, SHARED, HEADS // SHARED, -1, D)
    return causal(split, k[:, :, None], v[:, :, None]).reshape(q.shape)


def interleaved(x: Tensor) -> Tensor:
    return x.repeat_interleave(HEADS // SHARED, 1)


FORMS: dict[str, Function] = {
    "expand": lambda q, k, v: causal(q, expanded(k), expanded(v)),
    "repeat_interleave": lambda q, k, v: causal(q, interleaved(k), interleaved(v)),
    "grouped": grouped,
    "transposed": transposed,
    "library": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    "library with a mask": lambda q, k, v: F.scaled_dot_product_attention(
        q, expanded(k), expanded(v), torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    ),
}


def inputs(queries: int, keys: int) -> list[Tensor]:
    shapes = ((HEADS, queries), (SHARED, keys), (SHARED, keys))
    return [torch.randn(1, h, n, D).half() for h, n in shapes]


def right(made: Device, function: Function, given: list[Tensor]) -> None:
    (ours, *_), _ = made.run(given)
    verdict = accuracy.compare(ours, function(*given), accuracy.in_float64(function)(*given))
    assert verdict.passed, verdict


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_repeated_in_memory(form: str) -> None:
    """One kernel, one pass, under the diagonal only; keys and values are read as they lie."""
    function, given = FORMS[form], inputs(300, 300)
    made = compiled(function, given)
    (kernel,) = made.kernels
    assert len(kernel.params) == 4
    loops = inner(kernel.program.body)
    assert loops and all(axes_of(s.stop) for s in loops)
    assert len({repr(s.start) for s in loops}) == len(loops), "one pass"
    right(made, function, given)


@pytest.mark.parametrize("length", [1, 2, 17, 127, 129, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_length(length: int) -> None:
    function = FORMS["expand"]
    made = compiled(function, inputs(40, 40), [(2,), (2,), (2,)])
    right(made, function, inputs(length, length))


def documents(q: Tensor, k: Tensor, v: Tensor, own: Tensor, ids: Tensor) -> Tensor:
    s = (q @ expanded(k).transpose(-1, -2) / math.sqrt(D)).float()
    i, j = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
    seen = (j <= i) & (own[:, None] == ids[None, :])
    return torch.softmax(torch.where(seen, s, float("-inf")), -1).to(v.dtype) @ expanded(v)


@pytest.mark.parametrize("length", [1, 2, 17, 127, 129, 300])
@pytest.mark.parametrize("sort", [True, False])
def test_documents(length: int, sort: bool) -> None:
    """Ids in any order: one kernel, which leaves out what lies above the diagonal."""
    ids = torch.randint(0, 4, (length,))
    ids = ids.sort().values if sort else ids
    given = [*inputs(length, length), ids, ids.clone()]
    made = compiled(documents, given)
    if length >= 129:
        (kernel,) = made.kernels
        loops = inner(kernel.program.body)
        assert loops and all(axes_of(s.stop) for s in loops)
    right(made, documents, given)
