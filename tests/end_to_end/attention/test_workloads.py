"""The seven cores: each is the formula it stands for, and stays itself when compiled."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.attention.workloads import WORKLOADS, Layout, Sizes, export
from tests.support.attention.cores import HALVES, LOUD, Guarded, deciding, free
from tests.support.fp64_rule import WAYS, Dims, built, wrong

import tilewright
from tilewright import accuracy, measure

NAMES = tuple(WORKLOADS)
ODD = Sizes(21, heads=8, depth=12, batch=2, keys=37, kv_heads=2, value_depth=5)

# --- what they are ---------------------------------------------------------------------------------------------------


def probabilities(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def formula(name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, noise: np.ndarray) -> list[np.ndarray]:
    """One head, from the definition: q [S_q, D], k [S_kv, D], v [S_kv, D_v], noise [S_q, S_kv]."""
    queries, keys = len(q), len(k)
    z = np.full((queries, keys), -np.inf)
    for i in range(queries):
        for j in range(i + keys - queries + 1):
            z[i, j] = q[i] @ k[j] / math.sqrt(len(q[i]))
            if name == "gemma2":
                z[i, j] = 50 * math.tanh(z[i, j] / 50)
    p = probabilities(z)
    received = p.sum(0)
    pooled = [sum(received[max(0, j - 2) : j + 3]) / 5 for j in range(keys)]
    average = [1 / (i + 1 + keys - queries) for i in range(queries)]
    kept = {
        "h2o": [received],
        "roco": [received, (p**2).sum(0)],
        "keyformer": [probabilities((z - np.log(noise)) / 1.5).sum(0)],
        "snapkv": [np.array(pooled)],
        "corm": [np.array([any(p[i, j] >= average[i] for i in range(queries)) for j in range(keys)])],
    }
    return [p @ v, *kept.get(name, [])]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", NAMES)
def test_a_core_is_its_formula(name: str, layout: Layout) -> None:
    inputs = ODD.inputs(name, layout=layout, dtype=torch.float32)
    found = measure.flatten(accuracy.in_float64(WORKLOADS[name](layout))(*inputs))
    if layout == "bshd":
        inputs = (*(t.transpose(1, 2) for t in inputs[:3]), *inputs[3:])
        found = (found[0].transpose(1, 2), *found[1:])
    q, k, v = (t.double().numpy() for t in inputs[:3])
    noise = inputs[3].double().numpy() if len(inputs) > 3 else np.ones((2, 8, 21, 37))
    for b in range(2):
        for h in range(8):
            wanted = formula(name, q[b, h], k[b, h // 4], v[b, h // 4], noise[b, h])
            for ours, w in zip(found, wanted, strict=True):
                np.testing.assert_allclose(ours[b, h].numpy(), w, rtol=1e-6)  # 1e-6: the averages are fp32


# --- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_file_serves_all_lengths(name: str, tmp_path: Path) -> None:
    module = WORKLOADS[name]().eval()
    first, second = ODD, Sizes(9, heads=8, depth=12, batch=1, keys=30, kv_heads=2, value_depth=5)
    inputs = first.inputs(name, dtype=torch.float32)
    path = export(module, inputs, tmp_path, name, dynamic=True)
    assert [p.name for p in tmp_path.iterdir()] == [f"{name}.onnx"]
    theirs = measure.onnxruntime(measure.Workload(name, path, inputs), 1)
    assert isinstance(theirs, measure.BuiltPeer)
    ours = tilewright.compile(path, inputs)
    for compiled in (theirs.call, ours):
        draws = [s.inputs(name, dtype=torch.float32) for s in (first, second)]
        assert not wrong(module, compiled, draws, deciding(module))


# --- compiled --------------------------------------------------------------------------------------------------------


LENGTHS = ((2, 2), (17, 17), (127, 127), (129, 129), (17, 33), (2, 129))
"""Queries and keys."""
HIDDEN = ((89, 25),)
"""Rows that see nothing, more of them than a tile has."""
ONE = ((1, 1), (1, 5))
LONG = ((1000, 1000), (129, 1000))
CHUNKS = ((33, 4097), (129, 4095))
VERY_LONG = ((4097, 4097),)
MOST_DRAWS = 4
LOUD_LENGTHS = ((17, 33), (129, 129))
"""Where scores are also judged as loud as they get."""


def lengths(
    name: str,
    way: str,
    pairs: tuple[tuple[int, int], ...],
    dtype: torch.dtype = torch.float32,
    group: int = 1,
) -> None:
    """Queries and keys of any number, with one graph, another for equal numbers, and others for those of 1, a batch of
    one among them. `group` heads share keys and values."""
    module = WORKLOADS[name]().eval()
    before = tilewright.stats().graphs
    first = Sizes(40, 8 if group > 1 else 2, 16, keys=56, kv_heads=1 if group > 1 else 2)
    compiled = built(module, first.inputs(name, dtype=dtype), way, free(name))
    batches: set[int] = set()
    for queries, keys in pairs:
        batch = 4 if keys < 1000 else 2 if queries < 1000 else 1
        batches.add(batch)
        heads = 8 if group > 1 or queries < 4000 else 2
        # Few elements say little about the worst of them; a call for more of them costs less than more calls.
        count = max(1, min(64 if keys < 1000 else 4, 400 // queries))
        if count > MOST_DRAWS:
            batch, count = batch * -(-count // MOST_DRAWS), MOST_DRAWS
        sizes = Sizes(queries, heads, 16, batch, keys=keys, kv_heads=heads // group)
        for scale in (1.0, LOUD[dtype]) if (queries, keys) in LOUD_LENGTHS else (1.0,):
            draws = [sizes.inputs(name, dtype=dtype, scale=scale) for _ in range(count)]
            text = wrong(module, compiled, draws, deciding(module))
            assert not text, (queries, keys, scale, text)
    ones = sum(1 in pair for pair in pairs) + (1 in batches and len(batches) > 1)
    assert tilewright.stats().graphs - before <= 2 + ones


@pytest.mark.parametrize(("name", "way"), [("h2o", "inside"), ("corm", "library")])
def test_one_query(name: str, way: str) -> None:
    lengths(name, way, ONE)


@pytest.mark.parametrize(
    "name", [n if n in ("gemma2", "h2o", "corm") else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_any_length_inside_kernels(name: str) -> None:
    lengths(name, "inside", (*LENGTHS, *HIDDEN, *CHUNKS[:1]))


@pytest.mark.parametrize(
    "name", ["vanilla", *(pytest.param(n, marks=pytest.mark.slow) for n in ("corm", "roco"))]
)
def test_any_length_with_library_calls(name: str) -> None:
    lengths(name, "library", LENGTHS)


def test_rows_that_see_nothing_beside_library_calls() -> None:
    lengths("roco", "library", (*LENGTHS[:1], *HIDDEN))


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(n, marks=pytest.mark.slow) if name not in ("vanilla", "h2o", "corm") else n
        for n, name in enumerate(NAMES)
    ],
)
def test_any_length_in_halves(number: int) -> None:
    """Eight heads share keys and values."""
    lengths(NAMES[number], "inside", (*LENGTHS, *HIDDEN, *CHUNKS[:1]), HALVES[number % 2], 8)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_long(name: str, way: str) -> None:
    lengths(name, way, LONG + CHUNKS + VERY_LONG)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LOUD, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_length_in_every_type(name: str, dtype: torch.dtype) -> None:
    lengths(name, "inside", ONE + LENGTHS + HIDDEN + LONG + CHUNKS + VERY_LONG, dtype, 8)


@pytest.mark.parametrize(
    ("name", "layout", "sizes", "dtype", "scale"),
    [
        ("h2o", "bhsd", ODD, torch.float32, 1.0),
        ("corm", "bshd", ODD, torch.float16, 1.0),
        ("gemma2", "bhsd", ODD, torch.bfloat16, 1.0),
        ("snapkv", "bhsd", Sizes(70, 8, 32, kv_heads=1), torch.float16, 1.0),
        ("keyformer", "bshd", Sizes(33, 8, 32, keys=65, kv_heads=1), torch.bfloat16, 1.0),
        ("vanilla", "bshd", Sizes(64, 4, 64), torch.float16, 100.0),  # logits up to about 300
        ("roco", "bshd", Sizes(65, 4, 64, keys=80), torch.bfloat16, 100.0),
        ("roco", "bhsd", Sizes(65, 4, 64, keys=80), torch.float32, 3000.0),  # up to about 1e4
        ("vanilla", "bhsd", Sizes(66, 4, 64), torch.float32, 3000.0),
    ],
    ids=str,
)
def test_fixed_sizes(name: str, layout: Layout, sizes: Sizes, dtype: torch.dtype, scale: float) -> None:
    module = WORKLOADS[name](layout).eval()
    draws = [sizes.inputs(name, layout=layout, dtype=dtype, scale=scale) for _ in range(3)]
    for way in WAYS if scale == 1.0 and layout == "bhsd" else WAYS[1:]:
        assert not wrong(module, built(module, draws[0], way), draws, deciding(module)), way


@pytest.mark.parametrize(
    ("way", "dtype"),
    [*((way, torch.float32) for way in WAYS), *(("inside", dtype) for dtype in HALVES)],
    ids=str,
)
def test_queries_that_see_nothing(way: str, dtype: torch.dtype) -> None:
    """More queries than keys: the first see none. Their results are NaN in eager, and what sums over them; a softmax
    that guards itself gives zeros."""
    sizes = Sizes(40, 4, 16, keys=25)
    for module in (WORKLOADS["h2o"]().eval(), Guarded().eval()):
        draws = [sizes.inputs("h2o", dtype=dtype) for _ in range(3)]
        assert not wrong(module, built(module, draws[0], way), draws)
        with torch.no_grad():
            made = module(*draws[0])
        assert bool(made[0][:, :15].isnan().all()) is not isinstance(module, Guarded)


@pytest.mark.parametrize("way", WAYS)
def test_heads_of_any_number(way: str) -> None:
    module = WORKLOADS["vanilla"]().eval()
    draw = ODD.inputs("vanilla", dtype=torch.float32)
    dims: Dims = {"q": {1: "queries", 2: "heads", 3: "depth"}, "k": {1: "keys", 3: "depth"}, "v": {1: "keys"}}
    assert not wrong(module, built(module, draw, way, dims), [draw])
