"""Who computes an attention core: each contestant from a workload to a callable, or why it cannot."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import gpu_peers
from benchmarks.attention.workloads import Attention, SoftCap, Tensors, export
from tilewright import measure
from tilewright.measure import BuiltPeer, Call, Peer, Unavailable, Workload

EAGER, INDUCTOR, AUTOTUNE, FLEX = "eager", "inductor", "inductor max-autotune", "flex"
FLASH, CUDNN, ORT, OURS = "sdpa flash", "sdpa cudnn", "onnxruntime", "tilewright"
KERNELS = "tilewright kernels"
"""Our generated kernels where our compiler may take a library call instead."""
UNTRIMMED = "tilewright untrimmed"
"""They also compute what a mask hides."""
OWN = (OURS, KERNELS, UNTRIMMED)
NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cuda": (EAGER, INDUCTOR, AUTOTUNE, FLEX, FLASH, CUDNN, OURS, KERNELS),
        "cpu": (EAGER, INDUCTOR, ORT, OURS),
    }
)
MEASURING = (AUTOTUNE, *OWN)
"""They time candidates while they compile, for which they need the device alone."""

Option = str | bool
INSIDE: Mapping[str, Option] = {"contractions": "inside"}
GENERATED: Mapping[str, Option] = {**INSIDE, "trim": "exact"}
ABLATION: Mapping[str, Mapping[str, Option]] = MappingProxyType(
    {
        "library products": {"contractions": "library"},
        "fission": {**GENERATED, "fusion": "none", "rules": False},
        "+ rules": {**GENERATED, "fusion": "none"},
        "+ mapping": {**GENERATED, "fusion": "cover"},
        "+ fusion": GENERATED,
        OURS: INSIDE,
        "without rules": {**INSIDE, "rules": False},
    }
)
"""Contestants of the ablation. Products as library calls with kernels between them. Then, all generated: each op its
own kernel; ops rearranged by algebra; kernels chosen, with what they compute twice, but their ops run one by one; the
same fused; with what masks hide left out. And that without algebra."""

AUTOTUNED = "max-autotune-no-cudagraphs"
"""Timing captures graphs itself where kernels are short."""


class Ours:
    """Our compiler's callable, with what it compiled."""

    def __init__(self, target: Callable[..., object], inputs: Tensors, **options: Option) -> None:
        before = gpu_peers.compilations().fallbacks
        self.compiled = importlib.import_module("tilewright").compile(target, inputs, options=options)
        if gpu_peers.compilations().fallbacks > before:  # it would be eager under our name
            raise gpu_peers.MissingError("the graph was refused and runs as captured")

    def __call__(self, *inputs: Tensor) -> Tensors:
        """Flat results."""
        return measure.flatten(self.compiled(*inputs))


@dataclass(frozen=True)
class Apart:
    """A call with a mask that is made before it, and what makes one."""

    call: Call
    mask: Callable[[], object]

    def __call__(self, *inputs: Tensor) -> Tensors:
        """Flat results."""
        return self.call(*inputs)


def _plain(module: Attention) -> bool:
    """Whether nothing is kept besides the result."""
    return type(module).statistics is Attention.statistics


def compiled(mode: str | None) -> Peer:
    """`torch.compile` with Inductor."""

    def build(workload: Workload, threads: int) -> BuiltPeer:
        run = torch.compile(_module(workload), mode=mode, dynamic=False, fullgraph=True)
        return BuiltPeer(lambda *inputs: measure.flatten(run(*inputs)))

    return build


def built_with(options: Mapping[str, Option]) -> Peer:
    """Our compiler on the module, under these options."""

    def build(workload: Workload, threads: int) -> BuiltPeer:
        call = Ours(_module(workload), workload.inputs, **options)
        return BuiltPeer(call, lambda: str(call.compiled.coverage))

    return build


def build_ahead(workload: Workload, options: Mapping[str, Option]) -> None:
    """Leave our machine code for the workload in the kernel cache, without timing anything on the device; what fails
    fails again where it counts."""
    with contextlib.suppress(Exception):
        Ours(_module(workload), workload.inputs, **{**options, "measure": False})


def ablated(until: float) -> Mapping[str, Peer]:
    """Our compiler without some of what it does, as its model decides."""
    return {
        name: until_late(built_with({**given, "measure": False}), until) for name, given in ABLATION.items()
    }


def generated(workload: Workload, threads: int) -> BuiltPeer | Unavailable:
    """Our kernels for plain attention."""
    if type(_module(workload)) is not Attention:
        return Unavailable(f"the same as {OURS}")
    return built_with(INSIDE)(workload, threads)


def flex(workload: Workload, threads: int) -> BuiltPeer | Unavailable:
    """FlexAttention with the mask as blocks and the cap as a change of scores."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    module = _module(workload)
    if not _plain(module):
        return Unavailable("it keeps no statistics")
    q, k, v = _heads_first(module, workload.inputs)
    queries, keys, cap = q.shape[2], k.shape[2], module.cap if isinstance(module, SoftCap) else None

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i + (keys - queries)

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score if cap is None else cap * torch.tanh(score / cap)

    mask = create_block_mask(visible, None, None, queries, keys, device=str(q.device))
    run = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    change = None if cap is None else capped
    shared = q.shape[1] != k.shape[1]

    def call(*inputs: Tensor) -> Tensors:
        made = run(*_heads_first(module, inputs), change, mask, enable_gqa=shared)
        return (made.transpose(1, 2) if module.layout == "bshd" else made,)

    return BuiltPeer(call)


def sdpa(backend: SDPBackend) -> Peer:
    """Torch's fused attention with one of its backends."""

    def build(workload: Workload, threads: int) -> BuiltPeer | Unavailable:
        module = _module(workload)
        if type(module) is not Attention:
            return Unavailable("another function")
        q, k, _ = _heads_first(module, workload.inputs)
        if q.shape[2] != k.shape[2]:
            return Unavailable("its causal mask is aligned to the first query")
        shared = q.shape[1] != k.shape[1]

        def call(*inputs: Tensor) -> Tensors:
            with sdpa_kernel(backend):
                made = F.scaled_dot_product_attention(
                    *_heads_first(module, inputs), is_causal=True, enable_gqa=shared
                )
            return (made.transpose(1, 2) if module.layout == "bshd" else made,)

        return BuiltPeer(call)

    return build


def onnx_file(folder: Path) -> Peer:
    """ONNX Runtime on a file exported to `folder`."""

    def build(workload: Workload, threads: int) -> BuiltPeer | Unavailable:
        path = export(_module(workload), workload.inputs, folder, workload.name)
        return measure.onnxruntime(Workload(workload.name, path, workload.inputs), threads)

    return build


def peers(folder: Path, until: float) -> Mapping[str, Peer]:
    """All contestants; none is built after `until`. ONNX files are written to `folder`."""
    known: dict[str, Peer] = {
        EAGER: measure.eager,
        INDUCTOR: compiled(None),
        AUTOTUNE: compiled(AUTOTUNED),
        FLEX: flex,
        FLASH: sdpa(SDPBackend.FLASH_ATTENTION),
        CUDNN: sdpa(SDPBackend.CUDNN_ATTENTION),
        ORT: onnx_file(folder),
        OURS: built_with({}),
        KERNELS: generated,
    }
    return {name: until_late(peer, until) for name, peer in known.items()}


def until_late(peer: Peer, until: float) -> Peer:
    """The same contestant, not built any more after `until`."""

    def build(workload: Workload, threads: int) -> BuiltPeer | Unavailable:
        if time.time() > until:
            return Unavailable("no time left to build it")
        return peer(workload, threads)

    return build


def _module(workload: Workload) -> Attention:
    assert isinstance(workload.target, Attention)
    return workload.target


def _heads_first(module: Attention, inputs: Tensors) -> Tensors:
    return tuple(t.transpose(1, 2) if module.layout == "bshd" else t for t in inputs[:3])
