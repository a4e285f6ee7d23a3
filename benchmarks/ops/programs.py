"""A sample of an operator as a program: plain text over tensors, so that many of them make one function."""

from __future__ import annotations

import itertools
import linecache
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_numbers = itertools.count()


@dataclass(frozen=True)
class Program:
    """`text` is the body of a call over the tensors {0}, {1} and so on; `scope` holds what else it names."""

    text: str
    tensors: tuple[Tensor, ...]
    scope: Mapping[str, object] = field(default_factory=dict)

    @property
    def repeatable(self) -> bool:
        """Whether it can be judged: dense tensors of real numbers only."""
        return all(
            t.layout is torch.strided
            and not t.is_complex()
            and not t.is_quantized
            and not t.is_nested
            and not t.is_neg()
            and type(t) in (Tensor, torch.nn.Parameter)
            for t in self.tensors
        )

    def shown(self) -> str:
        """The call with shapes for its tensors."""
        kinds = (
            f"{str(t.dtype)[6:]}{list(t.shape)}{'' if t.is_contiguous() else f' by {list(t.stride())}'}"
            for t in self.tensors
        )
        return self.text.format(*kinds)


def program(op: Any, sample: Any) -> Program:
    """A sample of `op_db` as a program."""
    tensors: list[Tensor] = []
    name = "op_" + re.sub(r"\W", "_", op.full_name)
    scope: dict[str, object] = {name: op.op, "torch": torch}

    def written(x: object) -> str:
        if isinstance(x, Tensor):
            tensors.append(x)
            return f"{{{len(tensors) - 1}}}"
        if isinstance(x, float):
            return f'float("{x}")' if x != x or x in (float("inf"), -float("inf")) else repr(x)
        if isinstance(x, torch.dtype | torch.layout | torch.memory_format) or x in (None, True, False):
            return repr(x)
        if x is Ellipsis:
            return "..."
        if type(x) in (int, complex):
            return repr(x)
        if isinstance(x, str):
            return repr(x).replace("{", "{{").replace("}", "}}")
        if isinstance(x, slice):
            return f"slice({written(x.start)}, {written(x.stop)}, {written(x.step)})"
        if type(x) in (tuple, list, torch.Size):
            inside = ", ".join(map(written, x))
            return f"[{inside}]" if type(x) is list else f"({inside}{',' if len(x) == 1 else ''})"
        held = f"held{next(_numbers)}"  # a name of its own: programs of one function share a scope
        scope[held] = x
        return held

    first = [written(sample.input)]
    rest = [written(a) for a in sample.args]
    named = [f"{k}={written(v)}" for k, v in sample.kwargs.items()]
    return Program(f"{name}({', '.join([*first, *rest, *named])})", tuple(tensors), scope)


def joined(programs: Sequence[Program]) -> tuple[Callable[..., list[object]], list[Tensor]]:
    """One function that runs all of them, and its arguments: its results are a list with an entry per program."""
    arguments: list[Tensor] = []
    lines: list[str] = []
    scope: dict[str, object] = {"torch": torch}
    for p in programs:
        names = [f"t{len(arguments) + k}" for k in range(len(p.tensors))]
        arguments += p.tensors
        scope |= p.scope
        lines.append(f"        {p.text.format(*names)},")
    head = ", ".join(f"t{k}" for k in range(len(arguments)))
    text = "\n".join([f"def run({head}):", "    return [", *lines, "    ]", ""])
    place = f"<samples {next(_numbers)}>"
    linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
    exec(compile(text, place, "exec"), scope)
    run: Any = scope["run"]
    return run, arguments


def wide(p: Program) -> Program:
    """The same call in float64: its tensors and the types that it names."""
    text = p.text
    for narrow in ("torch.float32", "torch.float16", "torch.bfloat16"):
        text = text.replace(narrow, "torch.float64")
    tensors = [
        t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in p.tensors
    ]
    return Program(text, tuple(tensors), p.scope)


def copied(t: Tensor) -> Tensor:
    """A leaf of the same elements at the same strides and offset."""
    plain = t.detach()
    storage = plain.untyped_storage().clone()
    found = torch.empty(0, dtype=t.dtype, device=t.device).set_(
        storage, plain.storage_offset(), plain.shape, plain.stride()
    )
    return found.requires_grad_(t.requires_grad)


def strided(p: Program) -> Program:
    """The same call on tensors that are not dense: every second element of a larger one, or of a transposed one."""

    def spread(t: Tensor) -> Tensor:
        if t.layout is not torch.strided or t.dim() == 0 or t.numel() < 2:
            return t
        room = torch.empty((*t.shape[:-1], 2 * t.shape[-1] + 1), dtype=t.dtype, device=t.device)
        room.zero_()
        view = room[..., 1::2]
        with torch.no_grad():
            view.copy_(t.detach())
        return view.requires_grad_(t.requires_grad)

    return Program(p.text, tuple(map(spread, p.tensors)), p.scope)


def tensors_of(tree: object) -> Iterator[Tensor]:
    """The tensors of a result."""
    for leaf in torch.utils._pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
