"""Attention laid so that a traced program gets the fused routines of the library, and none that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, fx

from tilewright.tuning.input_limits import LIBRARY_FAULTS

HALVES = (torch.float16, torch.bfloat16)
_OPERANDS = ("query", "key", "value", "attn_mask")


def lay_masks(gm: fx.GraphModule) -> None:
    """Lay masks of attention whose keys do not lie side by side (a broadcast leaves them so) densely, on a GPU. The
    fused routines there take no others: what torch takes instead saves all scores for the backward pass."""
    for part in _parts(gm):
        laid = False
        for node, mask in _masked(part.graph):
            if not _lies_apart(mask.meta.get("example_value")):
                continue
            with part.graph.inserting_before(node):
                dense = part.graph.call_method("contiguous", (mask,))
            node.replace_input_with(mask, dense)
            laid = True
        if laid:
            part.recompile()


def avoid_wrong_routines(gm: fx.GraphModule) -> None:
    """Keep attention with masks that is trained on a GPU from what torch's calls of cuDNN silently get wrong (seen in
    torch 2.11 to 2.13). A mask of fp32 beside halves is read as if it were halves (pytorch issue 191612), and other
    fused routines take none: it is added plainly, as halves would lose what hides keys, and digits. Where half a tile
    of keys is left over, gradients may be NaN (196678): another routine is taken, also where their number is free."""
    for part in _parts(gm):
        if _without_wrong_routines(part.graph):
            part.recompile()


def _without_wrong_routines(graph: fx.Graph) -> bool:
    """Whether a graph is another one now. What takes no gradients stays as it is."""
    changed, tile = False, LIBRARY_FAULTS.cudnn_key_tile
    for node, _ in _masked(graph):
        q, k, m = (_example(_operand(node, position)) for position in (0, 1, 3))
        if q is None or k is None or m is None or m.device.type != "cuda" or not _is_trained(node):
            continue
        keys = k.shape[-2] if k.dim() > 1 else 0
        if m.dtype == torch.float32 and q.dtype in HALVES:
            node.target = attend_plainly
        elif isinstance(keys, torch.SymInt) or keys % tile == tile // 2:
            node.target = attend_without_cudnn
        changed |= node.target in (attend_plainly, attend_without_cudnn)
    return changed


def attend_without_cudnn(*args: object, **kwargs: object) -> Tensor:
    """As `scaled_dot_product_attention`, by a routine that is not cuDNN's if torch may take another one. What it may
    take is the same again afterwards."""
    cuda = torch.backends.cuda
    before = cuda.cudnn_sdp_enabled()
    others = cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.math_sdp_enabled()
    with _enabled(cuda.enable_cudnn_sdp, before, before and not others):
        return torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)  # pyright: ignore[reportArgumentType]


def attend_plainly(*args: object, **kwargs: object) -> Tensor:
    """As `scaled_dot_product_attention`, by no fused routine if torch may do without. What it may take is the same
    again afterwards."""
    cuda = torch.backends.cuda
    with ExitStack() as stack:
        for enable, before in (
            (cuda.enable_cudnn_sdp, cuda.cudnn_sdp_enabled()),
            (cuda.enable_flash_sdp, cuda.flash_sdp_enabled()),
            (cuda.enable_mem_efficient_sdp, cuda.mem_efficient_sdp_enabled()),
        ):
            stack.enter_context(_enabled(enable, before, before and not cuda.math_sdp_enabled()))
        return torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)  # pyright: ignore[reportArgumentType]


@contextmanager
def _enabled(enable: Callable[[bool], None], before: bool, meanwhile: bool) -> Generator[None]:
    enable(meanwhile)
    try:
        yield
    finally:
        enable(before)


def _parts(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """A graph and those that ops of it run: what is computed again for gradients (checkpoints), branches, loops."""
    return [part for part in gm.modules() if isinstance(part, fx.GraphModule)]


def _masked(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each attention with a mask, and the mask."""
    targets = torch.nn.functional.scaled_dot_product_attention, attend_without_cudnn
    for node in [n for t in targets for n in graph.find_nodes(op="call_function", target=t)]:
        mask = _operand(node, 3)
        if isinstance(mask, fx.Node):
            yield node, mask


def _operand(node: fx.Node, position: int) -> object:
    return node.args[position] if position < len(node.args) else node.kwargs.get(_OPERANDS[position])


def _is_trained(attention: fx.Node) -> bool:
    """Whether gradients are taken through it."""
    return any(t.requires_grad for n in attention.all_input_nodes if (t := _example(n)) is not None)


def _example(operand: object) -> Tensor | None:
    found = operand.meta.get("example_value") if isinstance(operand, fx.Node) else None
    return found if isinstance(found, Tensor) else None


def _lies_apart(mask: object) -> bool:
    """Whether keys of a mask on a GPU are known not to lie side by side. Of a free size nothing is asked: that would be
    a guard."""
    if not isinstance(mask, Tensor) or mask.device.type == "cpu" or not mask.dim():
        return False
    step = mask.stride(-1)
    return not isinstance(step, torch.SymInt) and step != 1
