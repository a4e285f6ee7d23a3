"""What becomes of a product whose measured kernel does not build: the library computes it, as the measured kernel was
all that was known to be faster."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tests.support.triton.described import Nowhere, traced
from torch import Tensor

from tilewright.emit.triton.kernel import TritonSource
from tilewright.errors import BuildError, KernelRefused
from tilewright.options import Options
from tilewright.pipeline.backends import cuda
from tilewright.pipeline.backends.cuda import CudaBackend
from tilewright.pipeline.build import ProductRefused
from tilewright.pipeline.compiler import Compiled, compile_fx
from tilewright.pipeline.phases import Phase
from tilewright.pipeline.replay_trial import Contest, ReplayTrial
from tilewright.pipeline.state import State
from tilewright.runtime.cuda.build import BuiltKernel
from tilewright.runtime.cuda.job import KernelFacts
from tilewright.runtime.store.cache import ContentStore
from tilewright.schedule.product_table import FastestProduct, MeasuredBlocks, ProductShape, ProductTable
from tilewright.target import Target, preset

FACTS = KernelFacts("k0", 0, 128, 0, None, None, "3.6.0")
SHAPES: Sequence[tuple[int, ...]] = ((64, 128), (256, 128), (64, 256), (128, 256), (50,))


def two(x: Tensor, w: Tensor, y: Tensor, v: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    """Two products that are not alike, beside a kernel without one: where all are refused, it is no fault of theirs."""
    return F.gelu(x @ w.t()), F.silu(y @ v.t()), torch.cumsum(z, 0).tanh()


@dataclass
class Compiler:
    """Refuses some texts."""

    refuses: Callable[[TritonSource], bool]
    asked: int = 0
    texts: list[str] = field(default_factory=list[str])

    def build(
        self, sources: Sequence[TritonSource], target: Target, store: ContentStore, *_: object, **__: object
    ) -> list[BuiltKernel]:
        self.asked += 1
        self.texts = [s.text for s in sources]
        if wrong := tuple(k for k, s in enumerate(sources) if self.refuses(s)):
            raise KernelRefused("it does not build", wrong)
        return [BuiltKernel(Path(), FACTS, b"") for _ in sources]


def has_product(source: TritonSource) -> bool:
    return "tl.dot" in source.text


@contextmanager
def machine(compiler: Compiler, table: ProductTable | None) -> Generator[None]:
    """A GPU for which `compiler` builds; with a clock that takes our kernels for faster where there is no table."""

    def timed(trial: ReplayTrial, contests: Sequence[Contest]) -> list[list[float | None]]:
        return [[1.0, *[0.5] * (len(ways) - 1)] for ways in contests]

    clock = None if table is not None else lambda run: 0.0
    with (
        mock.patch.object(cuda, "gpu_target", lambda ordinal: preset("sm_90")),
        mock.patch.object(cuda, "driver_device", lambda *_: Nowhere()),
        mock.patch.object(cuda, "build_kernels", compiler.build),
        mock.patch.object(cuda, "missing", lambda device: ""),
        mock.patch.object(CudaBackend, "replay_clock", lambda backend, device: clock),
        mock.patch.object(ReplayTrial, "__call__", timed),
        mock.patch("tilewright.pipeline.products.product_table", lambda target: table or ProductTable(())),
    ):
        yield


def table() -> ProductTable:
    """That knows both products."""
    blocks = MeasuredBlocks((16, 32), 32, 4, 3)
    sizes = ((64, 256, 128, 64 * 128), (64, 128, 256, 64 * 256))
    shapes = [ProductShape("contraction", 2, 1, True, 1, "kkn", 1, *s) for s in sizes]
    return ProductTable(tuple(FastestProduct(s, blocks, 8.0, 10.0, "somewhere") for s in shapes))


def made() -> Compiled:
    options = Options(tune_seconds=5)
    return compile_fx(traced(two, *SHAPES, dtype=torch.float16), options, trusted=True)


def calls(found: Compiled) -> int:
    """Library calls of products."""
    return sum("contraction" in call.reason for call in found.calls)


@pytest.mark.parametrize("from_table", [True, False], ids=["table", "clock"])
def test_the_library_computes_it(from_table: bool) -> None:
    known = table() if from_table else None
    compiler = Compiler(lambda source: False)
    with machine(compiler, known):
        assert calls(made()) == 0 and sum("tl.dot" in t for t in compiler.texts) >= 2
    compiler = Compiler(has_product)
    with machine(compiler, known), pytest.warns(RuntimeWarning, match="the library computes it.*not build"):
        found = made()
    assert calls(found) == 2 and not any("tl.dot" in t for t in compiler.texts)
    assert len(found.kernels) == 3 and compiler.asked == 3, "once for each product, and then without both"


def test_others_stay() -> None:
    """Only the one that was refused goes."""
    gelu = Compiler(lambda s: has_product(s) and "erf" in s.text)
    with machine(gelu, table()), pytest.warns(RuntimeWarning, match="the library computes it"):
        found = made()
    assert calls(found) == 1 and sum("tl.dot" in t for t in gelu.texts) >= 1


def test_what_only_makes_graphs_faster_does_not_swallow_it() -> None:
    """A phase that is left out where it fails would leave the product with a kernel that nobody measured."""

    def refuse(state: State) -> State:
        raise ProductRefused("it does not build", "some product")

    def fail(state: State) -> State:
        raise BuildError("another", phase="build")

    state = mock.Mock(spec=State)
    with pytest.raises(ProductRefused):
        Phase("ways", refuse, faster=True).tried(state)
    with pytest.warns(RuntimeWarning, match="left out"):
        assert Phase("ways", fail, faster=True).tried(state) is state
