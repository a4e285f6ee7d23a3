"""Attention under masks that are data: blocks with holes, documents, padding.

Others get their mask ready made, and what makes it is timed apart; ours finds in every call what its loops leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.attention.peers import FLEX, GENERATED, OURS, UNTRIMMED, Apart, Option, built_with, until_late
from benchmarks.attention.rows import judge
from benchmarks.attention.turn import Row
from benchmarks.attention.workloads import Attention, Sizes, Tensors
from tilewright import measure
from tilewright.measure import BuiltPeer, Workload

BLOCK = 128
DOCUMENTS = 4
SHARE = 0.25
"""Of the blocks that are visible."""
SDPA = "sdpa mask"
WAYS: Mapping[str, Mapping[str, Option]] = MappingProxyType({OURS: {}, UNTRIMMED: GENERATED})
"""Our contestants' options."""

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether batch b, head h, query i sees key j, as FlexAttention asks for it."""


class Masked(Attention):
    """softmax(q k^T / sqrt(D), where seen) v; all [B, H, S, D]."""

    def __init__(self) -> None:
        super().__init__("bhsd")

    def seen(self, data: Tensor, places: int) -> Tensor:
        """Bools that broadcast to [B, H, S, S]."""
        raise NotImplementedError

    def rule(self, data: Tensor) -> Rule:
        """The same for one score."""
        raise NotImplementedError

    def forward(self, q: Tensor, k: Tensor, v: Tensor, noise: Tensor | None = None) -> Tensor:
        """The result; `noise` is the mask's data."""
        assert noise is not None
        z = self.logits(q, k).masked_fill(~self.seen(noise, q.shape[2]), float("-inf"))
        return torch.softmax(z.float(), dim=-1).to(v.dtype) @ v


class Flags(Masked):
    """A table of flags [S / 128, S / 128] of blocks."""

    def seen(self, data: Tensor, places: int) -> Tensor:
        """Each flag for its block."""
        return data.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:places, :places]

    def rule(self, data: Tensor) -> Rule:
        """Look the flag up."""
        return lambda b, h, i, j: data[i // BLOCK, j // BLOCK]


class Documents(Masked):
    """Causal inside documents, whose ids are [S]."""

    def seen(self, data: Tensor, places: int) -> Tensor:
        """Equal ids, and no later place."""
        place = torch.arange(places, device=data.device)
        return (data[:, None] == data[None, :]) & (place[:, None] >= place[None, :])

    def rule(self, data: Tensor) -> Rule:
        """The same."""
        return lambda b, h, i, j: (data[i] == data[j]) & (i >= j)


class Padded(Masked):
    """Causal in sequences of lengths [B]."""

    def seen(self, data: Tensor, places: int) -> Tensor:
        """No later place, and none beyond the length."""
        place = torch.arange(places, device=data.device)
        return (place < data[:, None, None, None]) & (place[:, None] >= place[None, :])

    def rule(self, data: Tensor) -> Rule:
        """The same."""
        return lambda b, h, i, j: (j < data[b]) & (i >= j)


@dataclass(frozen=True)
class Case:
    """A mask, its data for a number of places, and how many sequences there are (each with a mask of its own if more
    than one)."""

    module: type[Masked]
    data: Callable[[int], Tensor]
    batch: int = 1


def _flags(places: int) -> Tensor:
    """Random ones, and the diagonal, so that every place sees something."""
    n = -(-places // BLOCK)
    return (torch.rand(n, n) < (SHARE - 1 / n) / (1 - 1 / n)) | torch.eye(n).bool()


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "flags": Case(Flags, _flags),
        "interleaved": Case(Documents, lambda n: torch.arange(n) // BLOCK % DOCUMENTS),
        "in order": Case(Documents, lambda n: torch.arange(n) * DOCUMENTS // n),
        "lengths": Case(Padded, lambda n: torch.tensor([n, 3 * n // 4, n // 2, n // 8]), batch=4),
    }
)


def row(name: str, sizes: Sizes, dtype: torch.dtype, device: torch.device, until: float) -> Row:
    """One mask; the same inputs for the same sizes."""
    torch.manual_seed(0)
    case = CASES[name]
    module, sizes = case.module().eval(), replace(sizes, batch=case.batch)
    data = case.data(sizes.queries).to(device)
    inputs = (*sizes.inputs("vanilla", layout="bhsd", dtype=dtype, device=device), data)
    visible = float(module.seen(data, sizes.queries).double().mean()) * case.batch * sizes.queries**2
    return Row(
        Workload(f"{name}-{sizes.queries}", module, inputs),
        {who: until_late(peer, until) for who, peer in PEERS.items()},
        lambda results: judge(module, inputs, results),
        4 * visible * sizes.heads * sizes.depth,
        0,  # nobody keeps a matrix of scores
        tuple(WAYS.values()),
    )


# --- contestants -----------------------------------------------------------------


def _module(workload: Workload) -> Masked:
    assert isinstance(workload.target, Masked)
    return workload.target


def flex(workload: Workload, threads: int) -> BuiltPeer:
    """FlexAttention with the mask as blocks."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, _, data = workload.inputs
    batch, queries, keys = (q.shape[0] if q.shape[0] > 1 else None), q.shape[2], k.shape[2]
    make, attend = create_block_mask, flex_attention
    if q.is_cuda:
        make, attend = (
            torch.compile(make, dynamic=False),
            torch.compile(attend, dynamic=False, fullgraph=True),
        )
    rule = _module(workload).rule(data)

    def mask() -> object:
        return make(rule, batch, None, queries, keys, device=q.device.type, BLOCK_SIZE=BLOCK)

    made = mask()
    return BuiltPeer(Apart(lambda *given: (attend(*given[:3], block_mask=made),), mask))


def sdpa(workload: Workload, threads: int) -> BuiltPeer:
    """Torch's fused attention with the mask as a tensor."""
    module, places = _module(workload), workload.inputs[0].shape[2]

    def mask() -> Tensor:
        return module.seen(workload.inputs[3], places)

    made = mask()

    def call(*given: Tensor) -> Tensors:
        return measure.flatten(F.scaled_dot_product_attention(*given[:3], attn_mask=made))

    return BuiltPeer(Apart(call, mask))


PEERS = MappingProxyType(
    {FLEX: flex, SDPA: sdpa} | {name: built_with(options) for name, options in WAYS.items()}
)
