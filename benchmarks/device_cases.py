"""Checks of the GPU runtime that are no op of a corpus. Each raises where something is wrong, and returns a remark."""

from __future__ import annotations

import copy
import gc
import itertools
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor

import tilewright
from tilewright.accuracy import compare
from tilewright.errors import IndexOutOfRange, InputError, OutOfMemory
from tilewright.runtime.cuda import kernels
from tilewright.schedule import solver
from tilewright.schedule.table import FastestBlock, Tuning

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def rms(x: Tensor, w: Tensor) -> Tensor:
    """A row reduction and what follows it."""
    h = x.float()
    return (h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6) * w).to(x.dtype)


def chain(x: Tensor) -> Tensor:
    """Softmaxes that cannot share a kernel: memory between kernels is needed."""
    return torch.softmax(torch.softmax(torch.softmax(x, 1), 0), 1) * 3


def network() -> torch.nn.Sequential:
    """Products, and kernels between them."""
    first, second = torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)
    return torch.nn.Sequential(first, torch.nn.GELU(), second, torch.nn.LayerNorm(256)).eval()


def compiled(function: Callable[..., object], *inputs: Tensor, **options: bool) -> Callable[..., Tensor]:
    """Compiled and called once."""
    run = tilewright.compile(function, inputs, options={"strict": True, **options})
    run(*inputs)
    return cast("Callable[..., Tensor]", run)


def environment() -> str:
    """What is here."""
    p = torch.cuda.get_device_properties(0)
    from tilewright.runtime.cuda.device import gpu_target

    t = gpu_target(0)
    return (
        f"{p.name}, torch {torch.__version__}, {t.name}, {t.cores} multiprocessors, "
        + ", ".join(f"{x.name} {x.capacity} at {x.bandwidth:.3g}" for x in t.levels)
        + f", clock {getattr(p, 'memory_clock_rate', None)} width {getattr(p, 'memory_bus_width', None)}"
    )


def both_doors() -> str:
    """torch.compile and tilewright.compile, with what they say of themselves."""
    x, w = torch.randn(64, 4096).half(), torch.randn(4096)
    run = tilewright.compile(rms, (x, w))
    other = torch.compile(rms, backend=tilewright.backend)
    torch.testing.assert_close(run(x, w), rms(x, w))
    torch.testing.assert_close(other(x, w), rms(x, w))
    assert "tl.load" in run.kernels[0].source  # type: ignore[attr-defined]
    return str(run.coverage)


def training() -> str:
    """Gradients."""
    x, w = torch.randn(64, 512, requires_grad=True), torch.randn(512, requires_grad=True)
    run = torch.compile(lambda x, w: rms(x, w).sin().sum(), backend=tilewright.backend)
    wanted = torch.autograd.grad(rms(x, w).sin().sum(), (x, w))
    got = torch.autograd.grad(run(x, w), (x, w))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    return ""


def library_calls() -> str:
    """A network with products: calls and kernels in stream order."""
    m = network()
    x = torch.randn(128, 256)
    run = tilewright.compile(m, (x,))
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(run(x), m(x), rtol=1e-4, atol=1e-4)
    return str(run.coverage)


def frozen_network() -> str:
    """Weights as constants, batch norm folded into a convolution."""
    m = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).eval()
    x = torch.randn(2, 3, 20, 20)
    run = tilewright.compile(m, (x,), freeze=True)
    with torch.no_grad():
        torch.testing.assert_close(run(x), m(x), rtol=1e-4, atol=1e-4)
    return str(run.coverage)


def sizes_of_nothing_one_and_primes() -> str:
    """One dynamic graph for many sizes, without building anything for them."""
    run = tilewright.compile(
        rms, (torch.randn(37, 64), torch.randn(64)), dims={"x": {0: "n", 1: "m"}, "w": {0: "m"}}
    )
    shapes = [(2, 2), (3, 127), (131, 16), (1021, 4093), (4096, 1024), (7, 65537), (0, 64)]
    for n, m in shapes:
        x, w = torch.randn(n, m), torch.randn(m)
        torch.testing.assert_close(run(x, w), rms(x, w), rtol=1e-4, atol=1e-5)
    return f"{tilewright.stats().triton} kernels built, {tilewright.stats().plan_misses} plans"


def strange_memory() -> str:
    """Misaligned, strided, transposed and expanded inputs."""
    w = torch.randn(512)
    flat = torch.randn(64 * 512 + 8)
    views = [flat[k : k + 64 * 512].view(64, 512) for k in (0, 1, 2, 3, 4)]
    views += [torch.randn(512, 64).t(), torch.randn(64, 1024)[:, ::2], torch.randn(1, 512).expand(64, 512)]
    run = torch.compile(rms, backend=tilewright.backend, dynamic=False)
    for x in views:
        torch.testing.assert_close(run(x, w), rms(x, w), **CLOSE)
    h = torch.randn(64 * 512 + 8).half()
    for k in (0, 1, 2, 3, 4, 8):
        x = h[k : k + 64 * 512].view(64, 512)
        torch.testing.assert_close(run(x, w), rms(x, w))
    return ""


def more_than_2_to_the_31() -> str:
    """Offsets that need 64 bits."""
    n = (1 << 31) + 4099
    x = torch.randint(-5, 5, (n,), dtype=torch.int8)
    run = compiled(lambda x: x * 2 + 1, x)
    y = run(x)
    for k in (0, (1 << 31) - 5, n - 4000):
        assert torch.equal(y[k : k + 4000], x[k : k + 4000] * 2 + 1)
    assert int((y.view(-1)[: 1 << 30] != x[: 1 << 30] * 2 + 1).sum()) == 0
    return ""


def out_tensors() -> str:
    """Results into the caller's memory."""
    x, w = torch.randn(64, 512), torch.randn(512)
    run = tilewright.compile(rms, (x, w))
    out = torch.empty(64, 512)
    assert run(x, w, out=out) is out
    torch.testing.assert_close(out, rms(x, w), **CLOSE)
    return ""


def writes() -> str:
    """A program that writes into its input."""

    def step(x: Tensor, s: Tensor) -> Tensor:
        s.mul_(0.5).add_(x.mean(0))
        return x - s

    x = torch.randn(64, 32)
    a, b = torch.zeros(32), torch.zeros(32)
    run = torch.compile(step, backend=tilewright.backend)
    for _ in range(3):
        torch.testing.assert_close(run(x, a), step(x, b), **CLOSE)
        torch.testing.assert_close(a, b, **CLOSE)
    return ""


def cpu_numbers() -> str:
    """A CPU tensor without dims is an operand; other CPU tensors are not."""
    x, s = torch.randn(64), torch.tensor(3.0, device="cpu")

    def scaled(x: Tensor, s: Tensor) -> Tensor:
        return x * s + 1

    run = tilewright.compile(scaled, (x, s), options={"strict": True})
    for value in (3.0, 4.0, 5.0):
        s = torch.tensor(value, device="cpu")
        torch.testing.assert_close(run(x, s), x * value + 1)
    mixed = torch.compile(lambda x: x.cpu() + 1, backend=tilewright.backend)
    assert mixed(x).device.type == "cpu"
    return str(run.coverage)


def wrong_device() -> str:
    """A CPU tensor where a GPU tensor is needed."""
    x, w = torch.randn(64, 512), torch.randn(512)
    program = torch.export.export(_Rms(), (x, w))
    run = tilewright.compile(program)
    torch.testing.assert_close(run(x, w), rms(x, w), **CLOSE)
    try:
        run(x.cpu(), w)
    except InputError as error:
        return str(error)
    raise AssertionError("nothing was raised")


class _Rms(torch.nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return rms(x, w)


def bad_index() -> str:
    """An index out of range is raised by synchronize, or by the next call; nothing else breaks."""
    table, good = torch.randn(50, 64), torch.randint(0, 50, (30,))
    run = compiled(lambda i, t: t[i] * 2, good, table)
    bad = good.clone()
    bad[3] = 5000
    run(bad, table)
    try:
        tilewright.synchronize()
        raise AssertionError("synchronize raised nothing")
    except IndexOutOfRange as error:
        said = str(error)
    tilewright.synchronize()
    run(bad, table)
    torch.cuda.synchronize()
    try:
        run(good, table)
        raise AssertionError("the next call raised nothing")
    except IndexError:
        pass
    torch.testing.assert_close(run(good, table), table[good] * 2)
    return said


def out_of_memory() -> str:
    """Our error with figures; nothing is leaked, and the next call works."""
    x = torch.randn(3 << 18)
    function = torch.compile(
        lambda x: (x[:, None] * x[None, :]).sin(), backend=tilewright.backend, dynamic=True
    )
    function(x[:100])
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    try:
        function(x)
        raise AssertionError("nothing was raised")
    except OutOfMemory as error:
        assert error.needed >= 2 << 40 and 0 < error.free < 1 << 40, (error.needed, error.free)
        said = str(error)
    gc.collect()
    assert torch.cuda.memory_allocated() <= before, (torch.cuda.memory_allocated(), before)
    torch.testing.assert_close(function(x[:77]), (x[:77, None] * x[None, :77]).sin(), **CLOSE)
    return said


def streams() -> str:
    """Calls on several streams at once do not share memory that is in flight."""
    inputs = [torch.randn(512, 512) for _ in range(6)]
    run = compiled(chain, inputs[0])
    wanted = [chain(x) for x in inputs]
    torch.cuda.synchronize()
    lines = [torch.cuda.Stream() for _ in range(6)]
    for _ in range(50):
        got: list[Tensor] = []
        for line, x in zip(lines, inputs, strict=True):
            with torch.cuda.stream(line):
                got.append(run(x))
        torch.cuda.synchronize()
        for g, w in zip(got, wanted, strict=True):
            torch.testing.assert_close(g, w, **CLOSE)
    return ""


def threads() -> str:
    """Calls from several threads, on one stream and on streams of their own."""
    inputs = [torch.randn(512, 512) for _ in range(4)]
    run = compiled(chain, inputs[0])
    wanted = [chain(x) for x in inputs]
    failures: list[str] = []

    def work(x: Tensor, want: Tensor, own: bool) -> None:
        line = torch.cuda.Stream() if own else torch.cuda.default_stream()
        with torch.cuda.stream(line):
            for _ in range(100):
                got = run(x)
                line.synchronize()
                if not torch.allclose(got, want, **CLOSE):
                    failures.append("differs")

    torch.cuda.synchronize()
    for own in (False, True):
        running = [
            threading.Thread(target=work, args=(x, w, own)) for x, w in zip(inputs, wanted, strict=True)
        ]
        for t in running:
            t.start()
        for t in running:
            t.join()
    assert not failures, f"{len(failures)} results differ"
    return ""


def caller_s_graph() -> str:
    """A caller captures compiled calls into a graph of his own."""
    x = torch.randn(512, 512)
    run = compiled(chain, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x)
    for _ in range(3):
        x.copy_(torch.randn(512, 512))
        run(torch.randn(512, 512))
        graph.replay()
        torch.testing.assert_close(y, chain(x), **CLOSE)
    return ""


def block_copies() -> str:
    """Operands that come by tensor descriptors, with usual and with specialised warps: rows with a tail, inputs that
    move, and a caller's graph."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax((q @ k.transpose(-1, -2) / 8).float(), -1).to(v.dtype) @ v

    def inputs(shift: int) -> list[Tensor]:
        flat = [torch.randn(3 * 1000 * 64 + shift, dtype=torch.float16) for _ in range(3)]
        return [x[shift:].view(1, 3, 1000, 64) for x in flat]

    asking = Tuning(tuple(FastestBlock(kind, 2, 64, 64, 64, 4, 3, True) for kind in ("products", "scores")))
    texts: list[str] = []
    for special in (False, True):
        usual, solver.table = solver.table, lambda target: asking
        try:
            first = inputs(0)
            options = {"strict": True, "contractions": "inside", "specialise_warps": special}
            run = tilewright.compile(attend, first, options=options)
            run(*first)
        finally:
            solver.table = usual
        texts.append(run.kernels[0].source)
        for shift in (0, 8, 1, 0):
            given = inputs(shift)
            torch.testing.assert_close(run(*given), attend(*given), rtol=1e-2, atol=1e-3)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(*first)
        run(*inputs(0))
        first[1].copy_(torch.randn(1, 3, 1000, 64))
        graph.replay()
        torch.testing.assert_close(y, attend(*first), rtol=1e-2, atol=1e-3)
    assert ".load([" in texts[0], "the target has no descriptors"
    return "specialised" if ".load([" not in texts[1] else "usual warps both times"


def cuda_graphs() -> str:
    """The option: results stay right when inputs move, when weights change, and on other streams."""
    m = network()
    x = torch.randn(128, 256)
    run = tilewright.compile(m, (x,), options={"cuda_graphs": True})
    kept: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for step in range(8):
            if step == 5:
                m[0].weight.mul_(1.5)
            y = x if step < 3 else torch.randn(128, 256)
            kept.append((run(y), m(y)))
        line = torch.cuda.Stream()
        torch.cuda.synchronize()
        for _ in range(5):
            with torch.cuda.stream(line):
                kept.append((run(x), m(x)))
            kept.append((run(x), m(x)))
        torch.cuda.synchronize()
    for got, want in kept:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    said = run.cuda_graphs
    assert any("CUDA graphs for" in s for s in said), said
    noisy = tilewright.compile(lambda x: torch.rand_like(x) * x, (x,), options={"cuda_graphs": True})
    made = [noisy(x) for _ in range(6)]
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(made)), noisy.cuda_graphs
    return f"{said}; {noisy.cuda_graphs}"


def training_with_graphs() -> str:
    """Forward and backward graphs as CUDA graphs, over steps that change the weights. In some, a second forward pass
    comes before the first backward pass; in some, gradients add up, or a result is kept. Judged against the same steps
    in float64: how far singles lead from them depends on the numbers."""
    ours, theirs = network(), network()
    theirs.load_state_dict(ours.state_dict())
    exact = copy.deepcopy(theirs).double()
    tilewright.reset()
    run = torch.compile(ours, backend=tilewright.backend, mode="reduce-overhead")
    models: list[tuple[Callable[[Tensor], Tensor], torch.nn.Module]] = [
        (run, ours),
        (theirs, theirs),
        (exact, exact),
    ]
    optimizers = [torch.optim.SGD(m.parameters(), 0.05) for _, m in models]
    kept: list[list[Tensor]] = []
    for step in range(16):
        x, more = torch.randn(128, 256), torch.randn(128, 256)
        kept.append([
            training_step(call, optimizer, step, *(t.to(next(m.parameters()).dtype) for t in (x, more)))
            for (call, m), optimizer in zip(models, optimizers, strict=True)
        ])  # fmt: skip
        for a, b, c in zip(*(m.parameters() for _, m in models), strict=True):
            verdict = compare(a.detach(), b.detach(), c.detach())
            assert verdict.passed, f"step {step}: {verdict}"
    for results in kept:
        verdict = compare(*results)
        assert verdict.passed, str(verdict)
    said = [line for c in tilewright.compilations() for line in c.cuda_graphs]
    assert sum("CUDA graphs for" in line for line in said) == 2, said
    return str(said)


def training_step(
    call: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, step: int, x: Tensor, more: Tensor
) -> Tensor:
    """One step of `training_with_graphs`; its result."""
    optimizer.zero_grad(set_to_none=step % 4 != 3)
    y = call(x)
    if step % 5 == 4:
        call(more).square().mean().backward()
    y.square().mean().backward(retain_graph=step % 6 == 5)
    if step % 6 == 5:
        y.sum().backward()
    optimizer.step()
    return y.detach()


def attention_with_graphs() -> str:
    """Dropout inside a library call draws new numbers at each replay."""
    q = torch.randn(2, 4, 64, 32, dtype=torch.float16)

    def attend(q: Tensor, drop: float) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=drop) * 2

    options = {"cuda_graphs": True}
    run = tilewright.compile(lambda q: attend(q, 0.0), (q,), options=options)
    for _ in range(5):
        torch.testing.assert_close(run(q), attend(q, 0.0), rtol=1e-2, atol=1e-2)
    noisy = tilewright.compile(lambda q: attend(q, 0.5), (q,), options=options)
    made = [noisy(q) for _ in range(6)]
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(made)), noisy.cuda_graphs
    return f"{run.cuda_graphs}; {noisy.cuda_graphs}"


def refused_capture() -> str:
    """Calls that wait for the device cannot be captured: they run without a graph, and all else goes on."""
    x = torch.randn(32, 32)
    x = x + x.T
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: torch.linalg.eigvalsh(x * 2) + 1,
        lambda x: torch.histc(x * 2, 10) + 1,
    ]
    said: list[str] = []
    stream = torch.cuda.current_stream()
    for function in functions:
        run = tilewright.compile(function, (x,), options={"cuda_graphs": True})
        for _ in range(5):
            torch.testing.assert_close(run(x), function(x), rtol=1e-4, atol=1e-3)
        assert torch.cuda.current_stream() == stream
        said += run.cuda_graphs
    after = torch.randn(64, 512)
    graphs = compiled(chain, after, cuda_graphs=True)
    for _ in range(4):
        torch.testing.assert_close(graphs(after), chain(after), **CLOSE)
        after = torch.randn(64, 512)
    return str(said)


def model_file() -> str:
    """A model file on the GPU: tensors of the device, and arrays."""
    node = onnx.helper.make_node
    value = onnx.helper.make_tensor_value_info
    weight = numpy_helper.from_array(np.random.randn(16, 8).astype(np.float32), "w")
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Softmax", ["h"], ["y"])]
    graph = onnx.helper.make_graph(
        nodes, "g", [value("x", 1, ["n", 16])], [value("y", 1, ["n", 8])], initializer=[weight]
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        onnx.save(model, path)
        run = tilewright.compile(path, device="cuda")
    w = torch.from_numpy(numpy_helper.to_array(weight).copy()).cuda()
    for n in (3, 1, 40):
        x = torch.randn(n, 16)
        torch.testing.assert_close(run(x), torch.softmax(x @ w, -1), rtol=1e-4, atol=1e-5)
        y = run(x.cpu().numpy())
        assert isinstance(y, np.ndarray), "arrays for arrays"
        torch.testing.assert_close(torch.from_numpy(y).cuda(), torch.softmax(x @ w, -1), rtol=1e-4, atol=1e-5)
    try:
        run(torch.randn(3, 16, device="cpu"))
        raise AssertionError("nothing was raised")
    except InputError as error:
        return f"{run.coverage}; {error}"


def host_microseconds(run: Callable[[], object], repeats: int = 200) -> float:
    """Median time until a call returns, on a device that is (nearly) idle."""
    found: list[float] = []
    for k in range(repeats):
        if k % 4 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return sorted(found)[repeats // 2] * 1e6


def _softmaxes(count: int) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        for k in range(count):
            x = torch.softmax(x, k % 2)
        return x

    return run


def _per_kernel(x: Tensor) -> tuple[float, str]:
    """Host microseconds that one more kernel costs, from a short and a long chain."""
    found: list[tuple[float, int]] = []
    for count in (4, 20):
        run = tilewright.compile(_softmaxes(count), (x,))
        for _ in range(5):
            run(x)
        found.append((round(host_microseconds(lambda run=run: run(x)), 1), len(run.kernels)))
        torch.testing.assert_close(run(x), _softmaxes(count)(x), **CLOSE)
    (short, few), (long, many) = found
    return (long - short) / max(1, many - few), f"{found}"


def launch_overhead() -> str:
    """Host time per kernel of a chain of kernels, outside a graph; one by one, and as a bundle."""
    torch.set_default_device(None)  # its mode would see every call, and take its time
    x = torch.randn(512, 512, device="cuda")
    bundled, first = _per_kernel(x)
    kernels.GPU_WORK = replace(kernels.GPU_WORK, min_bundled_launches=0)
    plain, second = _per_kernel(x)
    kernels.GPU_WORK = replace(kernels.GPU_WORK, min_bundled_launches=4)
    graphs = tilewright.compile(_softmaxes(20), (x,), options={"cuda_graphs": True})
    for _ in range(4):
        graphs(x)
    replay = host_microseconds(lambda: graphs(x))
    eager = host_microseconds(lambda: _softmaxes(20)(x))
    said = (
        f"{bundled:.2f} us per kernel bundled {first}, {plain:.2f} plain {second}; "
        f"20 softmaxes replayed {replay:.1f} us, eager {eager:.1f} us"
    )
    torch.set_default_device("cuda")
    assert bundled <= 3.0, said
    return said


def call_overhead() -> str:
    """Host time of a call with one small kernel."""
    torch.set_default_device(None)
    x = torch.randn(64, device="cuda")
    run = compiled(lambda x: x * 2 + 1, x)
    other = torch.compile(lambda x: x * 2 + 1, backend=tilewright.backend)
    other(x)
    ours, theirs, eager = (host_microseconds(lambda f=f: f(x)) for f in (run, other, lambda x: x * 2))
    torch.set_default_device("cuda")
    return f"tilewright.compile {ours:.2f} us, torch.compile {theirs:.2f} us, one eager op {eager:.2f} us"


def miscompiled() -> str:
    """What the compilers below get wrong. ptxas of CUDA 12: halves of packed sums, negative constants of bf16.
    Triton 3.6: sums of columns in loops. Triton: the sign of 0."""
    x, y = torch.randn(2, 2, 3, 8), torch.randn(2, 4, 65, 24).bfloat16()

    def unfolded(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(
            torch.nn.functional.unfold(x, 3, padding=1), (1, 0, 2, 1), mode="reflect"
        )

    torch.testing.assert_close(compiled(unfolded, x)(x), unfolded(x), rtol=0, atol=0)

    def least(y: Tensor) -> Tensor:
        return torch.nn.functional.softmin(y, -2)

    run = tilewright.compile(least, (y,), options={"fusion": "none"})
    torch.testing.assert_close(run(y), least(y.float()), rtol=1e-2, atol=1e-4, check_dtype=False)
    for kind in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        z = torch.zeros(64, dtype=kind)
        assert bool(torch.signbit(compiled(torch.neg, z)(z)).all()), kind

    def spread(w: Tensor) -> Tensor:
        return torch.var_mean(w, 0)[0]

    columns = tilewright.compile(spread, (torch.randn(2, 4, 3, 8),), dims={"w": {0: "b", 1: "m", 2: "n"}})
    for sizes in ((6, 14, 35), (17, 35, 48), (3, 64, 64)):
        w = torch.randn(*sizes, 8)
        torch.testing.assert_close(columns(w), spread(w), **CLOSE)
    return f"{len(run.kernels)} kernels"


ALL: tuple[Callable[[], str], ...] = (
    environment, both_doors, training, library_calls, frozen_network, sizes_of_nothing_one_and_primes, strange_memory,
    out_tensors, writes, cpu_numbers, wrong_device, bad_index, out_of_memory, streams, threads, caller_s_graph,
    block_copies, cuda_graphs, training_with_graphs, attention_with_graphs, refused_capture, model_file, call_overhead,
    launch_overhead, miscompiled, more_than_2_to_the_31,
)  # fmt: skip
