"""The rows of the comparison: who takes part in each, whether a result is right, what it took."""

# pyright: basic

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import gemm
from benchmarks.attention.peers import INSIDE, Ours
from benchmarks.attention.workloads import Attention as Causal
from benchmarks.gluon.variants import ATTENTIONS, PRODUCTS
from benchmarks.gpu_clock import Call, sets_needed, time_runs
from benchmarks.record import Facts
from tilewright import measure
from tilewright.options import Options
from tilewright.runtime.cuda.device import gpu_target
from tilewright.runtime.store.cache import ContentStore, default_root

BATCH, HEADS, DEPTH = 4, 16, 128
ALLOWED = 2.0
"""Times the library's error that a result may have."""

PATIENCE = 8.0
"""Seconds after which a first run that has not ended is taken to hang. It compiles before it."""

AT_ONCE = 4
"""Heads whose reference is computed at once."""

Tensors = tuple[Tensor, ...]
Builders = Mapping[str, Callable[[], Mapping[str, Call]]]
"""By name: what makes one contestant, or several of the same kind, with their names."""


class Lost(RuntimeError):
    """A kernel that does not end, or an error after which the process cannot use the device any more."""


@dataclass(frozen=True)
class Row:
    """One comparison: its inputs, who takes part, and the exact result in parts of the elements."""

    inputs: Callable[[torch.device], Tensors]
    builders: Callable[[torch.device], Builders]
    reference: Callable[[Tensors], Iterator[tuple[slice, Tensor]]]
    """fp32 values of the result where its first dim is in the slice."""
    library: str
    """Whose error is allowed ALLOWED times."""
    flops: float
    moved: int
    """Bytes, at least."""
    has_out: bool
    """Whether the last input is where the result goes."""


# --- products --------------------------------------------------------------------


def product(n: int) -> Row:
    """A square product x w^T."""
    shape = gemm.Shape(n, n, n)

    def exact(inputs: Tensors) -> Iterator[tuple[slice, Tensor]]:
        x, w, _ = inputs
        wide = w.float().t()
        for start in range(0, n, 1024):
            yield slice(start, start + 1024), x[start : start + 1024].float() @ wide

    def builders(device: torch.device) -> Builders:
        by_hand = {name: partial(dict, {name: variant}) for name, variant in PRODUCTS.items()}
        library = partial(dict, {gemm.CUBLAS: gemm.multiply})
        return {gemm.CUBLAS: library, **by_hand, "tilewright": partial(our_products, shape, device)}

    return Row(shape.inputs, builders, exact, gemm.CUBLAS, shape.flops, shape.moved, has_out=True)


def our_products(shape: gemm.Shape, device: torch.device) -> Mapping[str, Call]:
    """Our generated kernels under all proposed schedules: Triton's own text."""
    target, store = gpu_target(device.index or 0), ContentStore(default_root(Options()))
    found = gemm.kernels(shape, target)
    gemm.build(found, target, store)
    made = gemm.calls(found, target, store, device)
    return {f"tilewright {name}": call for name, call in made.items()}


# --- attention -------------------------------------------------------------------


class Full(nn.Module):
    """Attention without a mask, of q, k, v [B, H, S, D], as a user writes it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The result."""
        p = torch.softmax((q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).float(), dim=-1)
        return p.to(v.dtype) @ v


def attended(length: int, causal: bool) -> Row:
    """Attention over so many places, of BATCH times HEADS heads."""
    shape = (BATCH, HEADS, length, DEPTH)

    def inputs(device: torch.device) -> Tensors:
        return tuple(torch.randn(shape, device=device).half() for _ in range(3))

    def exact(given: Tensors) -> Iterator[tuple[slice, Tensor]]:
        q, k, v = (t.flatten(0, 1) for t in given)
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1) if causal else None
        for start in range(0, BATCH * HEADS, AT_ONCE):
            part = slice(start, start + AT_ONCE)
            scores = q[part].float() @ k[part].float().mT / math.sqrt(DEPTH)
            if hidden is not None:
                scores.masked_fill_(hidden, -torch.inf)
            yield part, torch.softmax(scores, dim=-1) @ v[part].float()

    def builders(device: torch.device) -> Builders:
        libraries = {
            "sdpa flash": SDPBackend.FLASH_ATTENTION,
            "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
        }
        made: dict[str, Callable[[], Mapping[str, Call]]] = {
            name: partial(dict, {name: partial(sdpa, backend, causal)}) for name, backend in libraries.items()
        }
        for name, variant in ATTENTIONS.items():
            made[name] = partial(dict, {name: partial(variant, causal=causal)})
        made["tilewright kernels"] = partial(our_attention, causal, shape, device)
        return made

    flops = 4.0 * BATCH * HEADS * length * length * DEPTH / (2 if causal else 1)
    return Row(inputs, builders, exact, "sdpa flash", flops, 2 * 4 * math.prod(shape), has_out=False)


def sdpa(backend: SDPBackend, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's fused attention with one of its backends."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def our_attention(causal: bool, shape: Sequence[int], device: torch.device) -> Mapping[str, Call]:
    """Our generated kernels: Triton's own text."""
    module = Causal("bhsd").eval() if causal else Full()
    given = tuple(torch.randn(*shape, device=device).half() for _ in range(3))
    ours = Ours(module, given, **INSIDE)
    return {"tilewright kernels": lambda *inputs: ours(*inputs)[0]}


ROWS: Mapping[str, Callable[[], Row]] = {
    "product 4096": partial(product, 4096),
    "product 8192": partial(product, 8192),
    "attention full 4096": partial(attended, 4096, False),
    "attention causal 4096": partial(attended, 4096, True),
    "attention causal 8192": partial(attended, 8192, True),
    "attention full 8192": partial(attended, 8192, False),
}


# --- running ---------------------------------------------------------------------


def run(
    row: Row, device: torch.device, rounds: int, refused: Mapping[str, str], write: Callable[[Facts], None]
) -> None:
    """Run one row and write its facts after each step: who is tried now (`trying`), errors, times. Raises Lost."""
    torch.manual_seed(0)
    sets = [row.inputs(device) for _ in range(sets_needed(row.moved, device))]
    contestants: dict[str, Facts] = {}
    facts: Facts = {"contestants": contestants, "sets": len(sets)}
    calls: dict[str, Call] = {}
    results: dict[str, Tensor] = {}
    for name, build in row.builders(device).items():
        if name in refused:
            contestants[name] = {"not_available": refused[name]}
            continue
        write(facts | {"trying": name})
        start = time.perf_counter()
        try:
            for each, call in build().items():
                results[each] = first(row, call, sets[0], device)
                calls[each] = call
                contestants[each] = {"first_run_s": time.perf_counter() - start}
        except Lost:
            raise
        except Exception as error:  # noqa: BLE001 - a contestant that fails has no figure
            check_device(device)
            print(f"{name}:\n{traceback.format_exc()}", flush=True)
            contestants[name] = {
                "not_available": measure.one_line(error),
                "traceback": traceback.format_exc(),
            }
    write(facts)
    wrong = errors(row, sets[0], results)
    results.clear()
    allowed = ALLOWED * max(wrong.get(row.library, 0.0), torch.finfo(torch.float16).eps)
    for name, error in wrong.items():
        contestants[name] |= {"error": error, "right": error <= allowed}
    write(facts)
    timed = time_runs({name: (call, sets) for name, call in calls.items()}, device, rounds)
    for name, found in timed.items():
        seconds = found.timing.median
        contestants[name] |= {
            "median_us": seconds * 1e6,
            "min_us": found.timing.minimum * 1e6,
            "TFLOP_per_s": row.flops / seconds / 1e12,
            "method": found.method,
        }
    write(facts | ratios(contestants))


def first(row: Row, call: Call, inputs: Tensors, device: torch.device) -> Tensor:
    """A copy of the result of the first run. Raises Lost where it does not end."""
    # What is not written must not look right: NaNs lie where the result goes, in memory that is given or taken anew.
    spoiled = inputs[-1] if row.has_out else torch.empty_like(inputs[0])
    spoiled.fill_(torch.nan)
    del spoiled
    result = call(*inputs)
    assert isinstance(result, Tensor)
    if device.type == "cuda":
        ended = torch.cuda.Event()
        ended.record()
        until = time.monotonic() + PATIENCE
        while not ended.query():
            if time.monotonic() > until:
                raise Lost(f"not ended after {PATIENCE} s")
            time.sleep(0.002)
    return result.clone()


def check_device(device: torch.device) -> None:
    """Raise Lost if the device does not answer any more."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.zeros(1, device=device).item()
        except Exception as error:
            raise Lost(measure.one_line(error)) from error


def errors(row: Row, inputs: Tensors, results: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest error of each result, as part of the largest element; infinite where something is no number."""
    worst = dict.fromkeys(results, 0.0)
    largest = 0.0
    with exact_products():
        for part, right in row.reference(inputs):
            largest = max(largest, float(right.abs().max()))
            for name, result in results.items():
                mine = result.reshape(-1, *right.shape[1:])[part].float()
                error = float((mine - right).abs().max())
                worst[name] = max(worst[name], error if math.isfinite(error) else math.inf)
    return {name: error / largest for name, error in worst.items()}


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """With fp32 products that are not rounded to fewer bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def ratios(contestants: Mapping[str, Facts]) -> Facts:
    """The best right contestant by hand, of ours and of the libraries, and the speed of the first over the others."""

    def best(kind: Callable[[str], bool]) -> tuple[str, float] | None:
        found = [
            (float(f["median_us"]), name)  # type: ignore[arg-type]
            for name, f in contestants.items()
            if kind(name) and "median_us" in f and f["right"]
        ]
        return (min(found)[1], min(found)[0]) if found else None

    hand = best(lambda name: name.startswith("gluon"))
    ours = best(lambda name: name.startswith("tilewright"))
    library = best(lambda name: not name.startswith(("gluon", "tilewright")))
    facts: Facts = {}
    for key, found in (("best_by_hand", hand), ("best_of_ours", ours), ("best_library", library)):
        facts[key] = found[0] if found is not None else None
    if hand is not None and ours is not None:
        facts["hand_over_ours"] = ours[1] / hand[1]
    if hand is not None and library is not None:
        facts["hand_over_library"] = library[1] / hand[1]
    return facts
