"""The weights of a program that is compiled with them: to be listed and compared, not to be changed."""

# What torch's modules call each other by begins with an underscore.
# pyright: reportPrivateUsage=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from tilewright.errors import UnsupportedError

_HINT = "compile the module itself, or save it again as it should be"


@dataclass(frozen=True, slots=True, eq=False)
class NamedWeight:
    """A tensor that a program holds, by the name that the program has for it. What it writes to is `written`."""

    name: str
    tensor: Tensor
    is_parameter: bool
    written: bool = False


class KeptParameter(nn.Parameter):
    """A parameter that nothing trains."""

    @property
    def requires_grad(self) -> bool:
        """It does not. Raises UnsupportedError where it is to."""
        return False

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.requires_grad_(wanted)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Nothing where no gradients are asked for. Raises UnsupportedError where they are."""
        if requires_grad:
            raise _fixed("it is for inference, and has no gradients")
        return self


class KeptWeights(nn.Module):
    """The module in whose place a compiled model stands that came from a file. It is for inference, in the types and
    on the device that it was made for."""

    def __init__(self, weights: Iterable[NamedWeight], device: torch.device | None) -> None:
        super().__init__()
        super().train(False)
        weights = tuple(weights)
        self._written = frozenset(w.name for w in weights if w.written)
        self._device = device or torch.device("cpu")
        for w in weights:  # names have dots, which torch lets no single name have
            if w.is_parameter:
                self._parameters[w.name] = KeptParameter(w.tensor.detach(), requires_grad=False)
            else:
                self._buffers[w.name] = w.tensor

    def train(self, mode: bool = True) -> Self:
        """Nothing where it is to infer. Raises UnsupportedError where it is to be trained."""
        if mode:
            raise _fixed("it is for inference, in the mode in which it was made")
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Nothing where no gradients are asked for. Raises UnsupportedError where they are."""
        KeptParameter(torch.empty(0), requires_grad=False).requires_grad_(requires_grad)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Nothing where tensors stay in their type and place. Raises UnsupportedError where they would not."""
        kinds = {
            (t.dtype, t.device)
            for t in (*self._parameters.values(), *self._buffers.values())
            if t is not None
        }
        typed = any(dtype.is_floating_point for dtype, _ in kinds)
        every = kinds if typed else kinds | {(torch.float32, self._device)}
        for dtype, device in sorted(every, key=lambda kind: not kind[0].is_floating_point):
            made = fn(torch.empty(0, dtype=dtype, device=device))
            there = made.device.type == device.type and made.device.index in (None, device.index or 0)
            if made.dtype is not dtype or not (there or made.device == device):
                raise _fixed(f"it computes with {dtype} on {device}, not with {made.dtype} on {made.device}")
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Take what the program writes to; all else must be as it is. Raises UnsupportedError for other weights."""
        _, strict, missing, unexpected, *_ = rest
        own = {**self._parameters, **self._buffers}
        for name, now in own.items():
            given = state_dict.get(prefix + name)
            if given is None or now is None:
                missing += [prefix + name] if strict else []
            elif name in self._written and given.shape == now.shape and given.dtype is now.dtype:
                now.copy_(given)
            elif given.dtype is not now.dtype or not torch.equal(given.to(now.device), now):
                raise _fixed(f"its code is made with its weights: {name} cannot be another one")
        if strict:
            unexpected += [k for k in state_dict if k.startswith(prefix) and k[len(prefix) :] not in own]

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises UnsupportedError: it is the compiled model that runs."""
        raise UnsupportedError("weights alone do not run", phase="run")


def weights_of(module: nn.Module, written: Collection[int] = ()) -> list[NamedWeight]:
    """Parameters and buffers of a module; it writes to those whose `id` is among `written`."""
    parameters = [NamedWeight(n, p, True, id(p) in written) for n, p in module.named_parameters()]
    return parameters + [NamedWeight(n, b, False, id(b) in written) for n, b in module.named_buffers()]


def _fixed(what: str) -> UnsupportedError:
    return UnsupportedError(f"a model from a file stays as it is: {what}", phase="input", hint=_HINT)
