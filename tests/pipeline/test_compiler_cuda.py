"""The pipeline for a GPU on a machine without one: described tensors in, machine code out, nothing run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.triton.described import Nowhere, traced
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright.capture.fx import from_fx
from tilewright.emit.triton.kernel import TritonSource
from tilewright.errors import KernelRefused, UnsupportedError
from tilewright.interp import run_graph
from tilewright.options import Options
from tilewright.pipeline.backends import cuda
from tilewright.pipeline.compiler import Compiled, compile_fx
from tilewright.plan import Copy
from tilewright.runtime.call.fallback import Captured
from tilewright.runtime.cuda import triton_compat
from tilewright.runtime.cuda.executable import CudaExecutable
from tilewright.runtime.cuda.kernels import CudaUnit
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.stats import STATS
from tilewright.schedule.gpu import matmul, shared_memory
from tilewright.schedule.gpu.shared_memory import shared_bytes
from tilewright.target import MemoryKind, preset

needs_triton = pytest.mark.skipif(triton_compat.version() is None, reason="Triton is not installed")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "gpu_target", lambda ordinal: preset("sm_90"))
    monkeypatch.setattr(cuda, "driver_device", lambda *_: Nowhere())


def compiled(gm: fx.GraphModule, cuda_graphs: bool = False) -> Compiled:
    return compile_fx(gm, Options(strict=True, cuda_graphs=cuda_graphs), trusted=True)


def rms(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w


@needs_triton
def test_one_kernel_in_one_variant() -> None:
    """Sizes are known, and torch aligns pointers."""
    STATS.reset()
    made = compiled(traced(rms, (64, 512), (512,)))
    assert isinstance(made.executable, CudaExecutable) and isinstance(made.executable.unit, CudaUnit)
    assert made.coverage.kernels == len(made.kernels) == 1 and STATS.triton + STATS.cache_hits == 1
    assert "tl.load" in made.kernels[0].source and "import triton" in made.kernels[0].source
    assert made.executable.plan.device == "cuda:0" and made.cuda_graphs == ()
    assert [p.name for p in made.trace.phases][-6:-2] == ["emit", "build", "load", "plan"]
    compiled(traced(rms, (64, 512), (512,)))
    assert STATS.triton <= 1, "found in the cache"


@needs_triton
def test_numbers_of_the_cpu_come_as_inputs() -> None:
    made = compiled(traced(lambda s, x: x * s, (), (64,), host=0), cuda_graphs=True)
    assert isinstance(made.executable, CudaExecutable) and made.executable.plan.host == (0,)
    assert made.cuda_graphs == ("no CUDA graph yet",)


@needs_triton
def test_products_are_library_calls() -> None:
    made = compiled(traced(lambda x, w: torch.relu(x @ w), (64, 32), (32, 16)))
    assert "contraction" in str(made.coverage) and made.coverage.kernels == 1
    assert "specialise" not in [p.name for p in made.trace.phases]


def test_mixed_devices_run_as_captured() -> None:
    gm = traced(lambda x, y: x * y.sum(), (64,), (64,), host=1)
    with pytest.raises(UnsupportedError, match="cpu and cuda:0"):
        compiled(gm)
    made = compile_fx(gm, Options(), trusted=True)
    assert isinstance(made.executable, Captured) and "cpu and cuda:0" in str(made.coverage)


@pytest.mark.parametrize("lacking", ["Triton is not installed (pip install triton)", "no C++ compiler"])
def test_without_a_builder_every_op_is_a_library_call(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    monkeypatch.setattr(cuda, "missing", lambda device: lacking)
    with pytest.warns(RuntimeWarning, match="every op runs as a library call") as seen:
        made = compile_fx(traced(rms, (64, 512), (512,)), Options(), trusted=True)
    assert len(seen) == 1 and lacking in str(seen[0].message)
    assert isinstance(made.executable, CudaExecutable) and made.executable.unit is None
    assert made.coverage.generated == 0 and not made.kernels


def test_devices_without_code_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        x = torch.empty(4, device="meta")
    gm = make_fx(lambda a: [a + 1], tracing_mode="fake")(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = compile_fx(gm, Options(), trusted=True)
    assert isinstance(made.executable, Captured)


def rows_and_columns(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = torch.softmax((q @ k.transpose(-1, -2) * 0.125).float(), -1)
    return p.half() @ v, p.sum(-2)


@needs_triton
def test_scores_that_are_folded_again_are_never_stored() -> None:
    made = compiled(traced(rows_and_columns, *((4, 1024, 64),) * 3, dtype=torch.float16))
    assert made.coverage.generated == made.coverage.ops and not made.calls
    assert len(made.kernels) == 2
    scores = 4 * 1024 * 1024 * 2
    assert all((k.bytes_moved or scores) < scores / 2 for k in made.kernels)


@needs_triton
def test_kernels_are_built_until_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate of shared memory that is too low costs another build, not the graph."""
    right = matmul.shared_bytes
    monkeypatch.setattr(matmul, "shared_bytes", lambda known, c: right(known, c) // 3)
    monkeypatch.setattr(matmul, "registers", lambda known, c, target, packed=False: 128)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax((q @ k.transpose(-1, -2)).float(), -1).to(v.dtype) @ v

    gm = traced(attend, *[(8, 2048, 256)] * 3, dtype=torch.float16)
    made = compile_fx(gm, Options(contractions="inside"), trusted=True)
    assert isinstance(made.executable, CudaExecutable)
    builds = [p for p in made.trace.phases if p.name == "emit"]
    assert len(builds) > 1


def turned(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    """A loop over two halves that are written along another dim than they are read, beside a kernel without loops."""
    made = torch.nn.functional.leaky_relu(y, 0.1)
    return torch.cat(((x * 2).mT, made.mT), 1), y > 0, torch.tanh(z)


TURNED = (2, 256, 128), (2, 256, 128), (32, 100)


@needs_triton
def test_a_loop_is_built_until_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stages are what it has too many of."""
    level = preset("sm_90").resized(capacities={MemoryKind.SHARED: 12 << 10})
    monkeypatch.setattr(cuda, "gpu_target", lambda ordinal: level)
    monkeypatch.setattr(shared_memory, "shared_bytes", lambda program, target: 0)
    with pytest.warns(RuntimeWarning, match=r"library calls.*bytes of shared memory"):
        assert compile_fx(traced(turned, *TURNED), Options(), trusted=True).calls
    right = shared_bytes
    monkeypatch.setattr(shared_memory, "shared_bytes", lambda program, target: right(program, target) // 3)
    made = compiled(traced(turned, *TURNED))
    assert isinstance(made.executable, CudaExecutable) and not made.calls
    assert len([p for p in made.trace.phases if p.name == "emit"]) > 1


@needs_triton
def test_triton_is_asked_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another schedule, where there is one."""
    printed = cuda.emit_kernel

    def broken(*given: Any) -> TritonSource:
        made = printed(*given)
        return replace(made, text=made.text + "    no_such_name\n") if "stages=3" in made.text else made

    assert "stages=3" in "".join(k.source for k in compiled(traced(turned, *TURNED)).kernels)
    monkeypatch.setattr(cuda, "emit_kernel", broken)
    made = compiled(traced(turned, *TURNED))
    assert not made.calls and "stages=3" not in "".join(k.source for k in made.kernels)


@needs_triton
def test_kernels_with_one_text_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of other shapes may be the same where these are joined; of other sizes they are others."""
    plain, seen = cuda.build_kernels, list[TritonSource]()

    def built(sources: Any, *given: Any, **named: Any) -> Any:
        seen.extend(sources)
        return plain(sources, *given, **named)

    monkeypatch.setattr(cuda, "build_kernels", built)

    def both(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return torch.relu(x), torch.relu(y), torch.relu(z)

    made = compiled(traced(both, (64, 256), (16384,), (77, 77)))
    assert len(made.kernels) == 3 and not made.calls
    assert len({s.text for s in seen}) == 2 and sorted(s.entry for s in seen) == ["k0", "k0", "k2"]


@needs_triton
def test_a_refused_kernel_costs_that_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = cuda.emit_kernel

    def broken(*given: Any) -> TritonSource:
        made = printed(*given)
        return replace(made, text=made.text + "    no_such_name\n") if "tanh" in made.text else made

    def two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x) * 2, torch.exp(y) + 1

    monkeypatch.setattr(cuda, "emit_kernel", broken)
    gm = traced(two, (64, 512), (32, 100))
    with pytest.warns(RuntimeWarning, match=r"tanh.*library calls.*no_such_name is not defined"):
        made = compile_fx(gm, Options(), trusted=True)
    assert isinstance(made.executable, CudaExecutable) and len(made.kernels) == 1
    assert {(c.name, c.reason) for c in made.calls} >= {("aten.tanh", "a refused kernel")}
    with pytest.raises(KernelRefused):
        compile_fx(gm, Options(strict=True), trusted=True)


@needs_triton
def test_kernels_that_are_all_refused_are_no_fault_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then Triton itself is at fault, and the graph is not compiled once for each."""
    builds: list[int] = []

    def refuse(sources: Sequence[TritonSource], **_: object) -> None:
        builds.append(len(sources))
        raise KernelRefused("it is broken", tuple(range(len(sources))))

    def three(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return torch.tanh(x).sum(-1), torch.exp(y) + 1, (z * 2).sum(0)

    monkeypatch.setattr(cuda, "build_kernels", refuse)
    with pytest.warns(RuntimeWarning, match="runs as captured"):
        made = compile_fx(traced(three, (64, 512), (32, 100), (40, 7)), Options(), trusted=True)
    assert isinstance(made.executable, Captured) and len(builds) == 1 and builds[0] >= 3


def test_a_norm_that_evaluates_hands_on_what_it_used() -> None:
    """On a GPU the results beside the first are the statistics; on a CPU they are empty."""

    def normed(x: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
        norm = torch.ops.aten._native_batch_norm_legit_no_training.default
        return norm(x, None, None, mean, variance, 0.1, 0.5)

    graph = from_fx(traced(normed, (3, 2, 4), (2,), (2,)))
    x, mean, variance = torch.randn(3, 2, 4), torch.randn(2), torch.rand(2)
    found = [torch.as_tensor(y) for y in run_graph(graph, [x, mean, variance])]
    wanted = [
        torch.batch_norm(x, None, None, mean, variance, False, 0.1, 0.5, False),
        mean,
        (variance + 0.5).rsqrt(),
    ]
    torch.testing.assert_close(found, wanted)


@needs_triton
def test_moments_of_one_element() -> None:
    """The mean is the element itself: nothing is divided."""
    made = compiled(traced(lambda x: x.std(0, correction=0), (1,)))
    assert made.kernels


@needs_triton
def test_numbers_that_torch_makes_of_sizes_are_generated() -> None:
    """Torch 2.11 computes with 0-dim tensors of the host where a program computes with sizes."""

    def scaled(x: Tensor) -> Tensor:
        count = torch.ops.aten.scalar_tensor.default(64.0, dtype=torch.float64)
        return x * torch.ops.prims.convert_element_type.default(2.0 / count, torch.float32)

    gm = traced(scaled, (64, 3))
    for n in gm.graph.nodes:
        if n.target is torch.ops.aten.reciprocal.default:
            with gm.graph.inserting_before(n):
                new = gm.graph.call_function(torch.ops.aten.true_divide.Tensor, (1.0, n.args[0]))
            new.meta = dict(n.meta)
            n.replace_all_uses_with(new)
    made = compiled(gm)
    assert "true_divide" in str(gm.graph) and made.coverage.kernels == 1 and not made.calls


# --- writes into inputs ---------------------------------------------------------------


def grown(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The new value of x, and a result."""
    return x * 0.9 + y, y * 2


def line(cache: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The new value of the cache, and a result."""
    made = torch.select_scatter(cache, k * 2, 1, 5)
    return made, made.sum(-1)


def written(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph whose first result is written into its first input. (No such copy can be traced here.)"""
    (output,) = gm.graph.find_nodes(op="output")
    (first, *_) = gm.graph.find_nodes(op="placeholder")
    (new, *rest) = output.args[0]
    with gm.graph.inserting_before(output):
        copy = gm.graph.call_function(torch.ops.aten.copy_.default, (first, new))
    copy.meta["val"] = first.meta["val"]
    output.args = (rest,)
    gm.recompile()
    return gm


@needs_triton
@pytest.mark.parametrize(
    ("program", "shapes", "waits"),
    [(grown, ((300, 70), (300, 70)), True), (line, ((4, 64, 128), (4, 128)), False)],
)
def test_a_gpu_stores_in_place(
    program: Callable[..., tuple[Tensor, Tensor]], shapes: tuple[tuple[int, ...], ...], waits: bool
) -> None:
    """Threads of a block may hold copies of what is loaded: all have loaded before one stores over it."""
    done = compiled(written(traced(program, *shapes)))
    assert isinstance(done.executable, Executable)
    plan = done.executable.plan
    assert plan.writes == ((0, ""),) and plan.changed == (0,)
    assert not any(isinstance(step, Copy) for segment in plan.segments for step in segment.steps)
    sources = [k.source for k in done.compilation.kernels]
    assert (
        any("tl.debug_barrier()\n    tl.store(" in text.replace("        ", "    ") for text in sources)
        is waits
    )
