"""What a module holds: parameters, buffers, gradients, and what its own optimizers remember. Read, and put back."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

Slots = MutableMapping[str, Any]
"""Parameters or buffers of one module by name."""


def state_of(module: object) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    if not isinstance(module, nn.Module):
        return {}
    named = (*module.named_parameters(), *module.named_buffers())
    return {
        name: t.detach()
        for name, t in named
        if not isinstance(t, UninitializedParameter | UninitializedBuffer)
    }


def trained_in(module: nn.Module) -> dict[str, Tensor]:
    """What a training step leaves: parameters, their gradients, and tensors of optimizers that the module holds."""
    named = dict(module.named_parameters())
    found = {f"parameter {name}": p for name, p in named.items()}
    found |= {f"gradient of {name}": p.grad for name, p in named.items() if p.grad is not None}
    of = {id(p): name for name, p in named.items()}
    for title, optimizer in optimizers_of(module).items():
        for p, remembered in optimizer.state.items():
            tensors = {k: t for k, t in remembered.items() if isinstance(t, Tensor)}
            found |= {f"{title} of {of.get(id(p), '?')}: {k}": t for k, t in tensors.items()}
    return {name: t.detach() for name, t in found.items()}


def optimizers_of(module: nn.Module) -> dict[str, Optimizer]:
    """Optimizers that a module or a part of it holds as an attribute, by that attribute's path."""
    return {
        f"{path}.{name}".lstrip("."): held
        for path, part in module.named_modules()
        for name, held in vars(part).items()
        if isinstance(held, Optimizer)
    }


@dataclass(frozen=True, slots=True)
class Slotted:
    """Where a module and its parts hold parameters and buffers, each with the tensors that it held."""

    slots: tuple[tuple[Slots, Slots], ...]

    @staticmethod
    def of(module: object) -> Slotted:
        """As they are now."""
        parts = module.modules() if isinstance(module, nn.Module) else ()
        slots: list[Slots] = [s for part in parts for s in (part._parameters, part._buffers)]  # pyright: ignore[reportPrivateUsage]
        return Slotted(tuple((one, dict(one)) for one in slots))

    def put_back(self) -> None:
        """Hold the tensors again that were held: programs assign others (`self.count = self.count + 1`)."""
        for slots, tensors in self.slots:
            if slots.keys() != tensors.keys() or any(slots[name] is not t for name, t in tensors.items()):
                slots.clear()
                slots.update(tensors)


@dataclass(frozen=True, slots=True)
class TrainedState:
    """All that a training step may write to, with copies of what was there."""

    slotted: Slotted
    tensors: tuple[tuple[Tensor, Tensor], ...]
    gradients: tuple[tuple[nn.Parameter, Tensor | None], ...]
    optimizers: tuple[tuple[Optimizer, dict[Any, dict[str, Any]], list[dict[str, Any]]], ...]

    @staticmethod
    def of(module: nn.Module) -> TrainedState:
        """As it is now."""
        parameters = tuple(module.parameters())
        optimizers = tuple(optimizers_of(module).values())
        return TrainedState(
            Slotted.of(module),
            tuple((t, t.clone()) for t in state_of(module).values()),
            tuple((p, None if p.grad is None else p.grad.clone()) for p in parameters),
            tuple(
                (o, {p: _copied(held) for p, held in o.state.items()}, [_copied(g) for g in o.param_groups])
                for o in optimizers
            ),
        )

    @torch.no_grad()
    def put_back(self) -> None:
        """Let everything hold again what it held."""
        self.slotted.put_back()
        for t, before in self.tensors:
            t.copy_(before)
        for p, gradient in self.gradients:
            p.grad = None if gradient is None else gradient.clone()
        for optimizer, state, groups in self.optimizers:
            for p in [p for p in optimizer.state if p not in state]:
                del optimizer.state[p]
            for p, held in state.items():
                optimizer.state[p].update(_copied(held))
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.update(_copied(before))


def _copied(held: Mapping[str, Any]) -> dict[str, Any]:
    """A copy, but for what is a list of parameters."""
    return {k: copy.deepcopy(v) for k, v in held.items() if k != "params"}


def widen(module: nn.Module) -> nn.Module:
    """`module` in float64, with its gradients and what its optimizers remember."""
    module.double()
    for optimizer in optimizers_of(module).values():
        for remembered in optimizer.state.values():
            wide = {
                k: t.double()
                for k, t in remembered.items()
                if isinstance(t, Tensor) and t.is_floating_point()
            }
            remembered.update(wide)
    return module


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same, NaNs in the same places."""
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
