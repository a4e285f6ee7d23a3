"""Measures on the device whether a convolution that adds and rectifies while it writes is right and faster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.expr import Expr
from tilewright.ir.graph import LibraryCall, Operand, Value, bind
from tilewright.ir.identity import identity
from tilewright.ir.sizes import dims
from tilewright.library.fuse_convolutions import FusedForm
from tilewright.library.offers.offer import channels_last
from tilewright.runtime.plan.tensors import drawn, torch_dtype
from tilewright.runtime.store.cache import Store, digest
from tilewright.target import MemoryKind, Target
from tilewright.tuning.search_limits import CONVOLUTIONS

LOG = logging.getLogger("tilewright")
FILE = "faster"

Run = Callable[[], Tensor]


@dataclass(slots=True)
class ConvolutionTimer:
    """Judges fused forms on `device`, at the sizes of `hints`; verdicts stay in `store`."""

    target: Target
    store: Store
    hints: SizeHints
    device: str
    known: dict[str, bool] = field(default_factory=dict)

    def __call__(self, form: FusedForm) -> bool:
        """Whether the fused form is right, and faster than the convolution and a pass over its result. One that cannot
        be run here is not."""
        key = self._key(form)
        if key not in self.known:
            stored = self._recalled(key)
            self.known[key] = self._measured(form) if stored is None else stored
            if stored is None:
                self.store.put(key, {FILE: b"1" if self.known[key] else b"0"})
        return self.known[key]

    def _key(self, form: FusedForm) -> str:
        sizes = [
            (v.dtype, *map(self.hints.estimate, v.shape))
            for v in (*form.inputs, *filter(None, (form.second,)))
        ]
        where = (
            torch.cuda.get_device_name(self.device),
            torch.__version__,
            str(torch.backends.cudnn.version()),
        )
        calls = identity(form.fused.function, form.plain.args, self.target.digest(), tuple(sizes))
        return digest("rectified convolution", *where, calls, str(torch.backends.cudnn.benchmark))

    def _recalled(self, key: str) -> bool | None:
        folder = self.store.get(key)
        try:
            return None if folder is None else (folder / FILE).read_bytes() == b"1"
        except OSError as error:
            LOG.info("no verdict is taken from %s: %s", folder, error)
            return None

    def _measured(self, form: FusedForm) -> bool:
        try:
            with torch.no_grad(), torch.cuda.device(self.device):
                return self._is_right(form) and self._is_faster(form)
        except (RuntimeError, MemoryError) as refused:
            LOG.info("%s is not a way here: %s", form.fused.name, refused)
        except Exception:
            LOG.exception("%s failed in a way that nobody expects; it is not taken", form.fused.name)
        return False

    def _is_right(self, form: FusedForm) -> bool:
        """Whether results lie as those of the convolution, and NaN stays NaN: some kernels of the library take the
        other operand of it."""
        tensors = self._operands(form)
        tensors[0].fill_(float("nan"))
        plain, fused = (_bound(call, tensors)() for call in (form.plain, form.fused))
        return plain.stride() == fused.stride() and bool((plain.isnan() == fused.isnan()).all())

    def _is_faster(self, form: FusedForm) -> bool:
        tensors = self._operands(form)
        plain, fused = (_seconds(_bound(call, tensors)) for call in (self._without_bias(form), form.fused))
        passed = 2 if form.second is None else 3
        moved = passed * self.hints.estimate(form.result.numel) * form.result.dtype.bytes
        device = next(x for x in self.target.levels if x.kind is MemoryKind.DEVICE)
        return fused <= plain + self.target.launch_seconds + moved / device.bandwidth

    def _without_bias(self, form: FusedForm) -> LibraryCall:
        """The convolution as it runs beside a kernel, which adds the bias."""
        x, weight, _, *rest = form.plain.args
        return replace(form.plain, args=(x, weight, None, *rest))

    def _operands(self, form: FusedForm) -> list[Tensor]:
        """Random ones, which lie as the calls want them."""
        values = [*form.inputs, *filter(None, (form.second,))]
        wants = [*form.fused.wants, *[None] * len(values)]
        return [self._tensor(v, s) for v, s in zip(values, wants, strict=False)]

    def _tensor(self, v: Value, strides: Sequence[Expr] | None) -> Tensor:
        dense = channels_last if len(v.shape) == 4 else dims.dense_strides
        laid = strides if strides is not None else dense(v.shape)
        sizes, steps = (list(map(self.hints.estimate, x)) for x in (v.shape, laid))
        return drawn(torch.empty_strided(sizes, steps, dtype=torch_dtype(v.dtype), device=self.device))


def _bound(call: LibraryCall, tensors: Sequence[Tensor]) -> Run:
    args = [tensors[a.index] if isinstance(a, Operand) else a for a in call.args]
    function, named = bind(call.function), dict(call.kwargs)

    def run() -> Tensor:
        made = function(*args, **named)
        assert isinstance(made, Tensor)
        return made

    return run


def _seconds(run: Run) -> float:
    """Device time of one run: the least of several replays of a graph of some runs, so that no launch is waited for."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CONVOLUTIONS.runs_per_replay):
                run()
        times: list[float] = []
        for _ in range(CONVOLUTIONS.replays):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record(stream)
            graph.replay()
            after.record(stream)
            after.synchronize()
            times.append(before.elapsed_time(after) / 1e3)
    return min(times) / CONVOLUTIONS.runs_per_replay
