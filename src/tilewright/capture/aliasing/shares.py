"""Whose memory a captured program returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from tilewright.capture.autograd.saved import first_saved
from tilewright.capture.opaque import Runner, returned
from tilewright.ir.graph import Share, Shares

from .memory import storage_of


def output_shares(gm: fx.GraphModule) -> tuple[Share, ...]:
    """For each output, whose memory it is beside its own."""
    given = _storages(n for n in gm.graph.nodes if n.op == "placeholder")
    written = _storages(n.args[1] for n in gm.graph.nodes if is_write(n))
    outputs = returned(gm)
    storages = [storage_of(node) for node in outputs]
    number = {s: k for k, s in enumerate(dict.fromkeys(storages))}
    found: list[Share] = []
    for k, storage in enumerate(storages):
        shares = Shares.NOTHING
        if storage is not None and storage in given:
            shares |= Shares.INPUT
        if storage is not None and (storage in written or storage in storages[:k] + storages[k + 1 :]):
            shares |= Shares.OUTPUT
        found.append(Share(shares, number[storage] if storage is not None else len(number) + k))
    return tuple(found)


def told_apart(gm: fx.GraphModule, runner: Runner) -> Runner:
    """`runner` with a tensor of its own for each result of the program, though it shows what another or an input shows:
    torch marks results one by one as what has no gradient, and would mark both."""
    given: dict[int, list[int]] = {}
    for i, node in enumerate(n for n in gm.graph.nodes if n.op == "placeholder"):
        if (storage := storage_of(node)) is not None:
            given.setdefault(storage, []).append(i)
    earlier: dict[int, dict[object, int]] = {}
    like: list[tuple[int, list[int], list[int]]] = []
    for k, node in enumerate(returned(gm)[: first_saved(gm)]):
        storage = storage_of(node)
        if storage is None or (isinstance(node, fx.Node) and node.op == "placeholder"):
            continue
        before = earlier.setdefault(storage, {})
        others, inputs = [j for n, j in before.items() if n is not node], given.get(storage, [])
        like += [(k, others, inputs)] if others or inputs else []
        before.setdefault(node, k)
    if not like:
        return runner
    plain: Callable[[], Runner] | None = getattr(runner, "entry", None)
    inner = runner if plain is None else plain()

    def run(args: list[object]) -> list[object]:
        inputs = [[args[i] for i in places] for _, _, places in like]
        results = inner(args)
        for (k, others, _), seen in zip(like, inputs, strict=True):
            made = results[k]
            if isinstance(made, Tensor) and any(made is t for t in (*(results[j] for j in others), *seen)):
                results[k] = made.detach()
        return results

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


def saved_inputs(gm: fx.GraphModule) -> list[int]:
    """The numbers of the inputs whose memory a forward pass saves for the backward pass."""
    count = first_saved(gm)
    saved = {storage_of(n) for n in returned(gm)[count:]} - {None} if count is not None else set()
    places = gm.graph.find_nodes(op="placeholder")
    return [k for k, n in enumerate(places) if storage_of(n) in saved]


def placed_by_size(gm: fx.GraphModule, shares: Sequence[Share]) -> tuple[int, ...]:
    """The outputs whose place in the memory that they share torch reads off the result, in programs of sizes that are
    not known: it makes them anew from what was given, at the result's strides and offset."""
    if not has_sizes(gm):
        return ()
    outputs = returned(gm)
    held = {n for n in gm.graph.nodes if n.op == "placeholder"}
    held |= {n.args[1] for n in gm.graph.nodes if is_write(n)} | {
        n for n in outputs if isinstance(n, fx.Node)
    }
    pairs = enumerate(zip(outputs, shares, strict=True))
    return tuple(k for k, (node, share) in pairs if share.kind and _is_part(node, held))


def has_sizes(gm: fx.GraphModule) -> bool:
    """Whether sizes are among the inputs."""
    return any(isinstance(n.meta.get("val"), torch.SymInt) for n in gm.graph.nodes if n.op == "placeholder")


def _is_part(node: object, held: set[fx.Node]) -> bool:
    """Whether a node shows a part, not known to be the first, of one of the tensors `held`."""
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(node, fx.Node) or not isinstance(val, Tensor):
        return False
    offset = val.storage_offset()
    if not isinstance(offset, torch.SymInt) and not offset:
        return False
    source = node.args[0] if node.args else None
    while isinstance(source, fx.Node) and _shows(source, node):
        if source in held:
            return True
        source = source.args[0] if source.args else None
    return False


def _shows(source: fx.Node, node: fx.Node) -> bool:
    """Whether a node, or what it takes apart (`split`), has the storage of another one."""
    val = source.meta.get("val")
    parts = cast(Sequence[object], val) if isinstance(val, (list, tuple)) else ()
    found = [t for t in parts if isinstance(t, Tensor)]
    if found:
        own = node.meta["val"].untyped_storage()
        return all(t.untyped_storage()._cdata == own._cdata for t in found)  # pyright: ignore[reportPrivateUsage]
    return storage_of(source) == storage_of(node)


def find_written(gm: fx.GraphModule) -> set[fx.Node]:
    """The tensors that the program writes into."""
    return {n.args[0] for n in gm.graph.nodes if is_write(n) and isinstance(n.args[0], fx.Node)}


def is_write(node: fx.Node) -> bool:
    """Whether a node copies a value into an input."""
    return isinstance(node.target, OpOverload) and node.target.overloadpacket.__name__ == "copy_"


def _storages(nodes: Iterable[object]) -> set[int]:
    return {s for s in map(storage_of, nodes) if s is not None}
