"""One training step as a program whose results can be compared: its loss, its gradients, its buffers, and whatever
else it writes: weights, where the module steps an optimizer of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tilewright.errors import InputError

from .state import same, trained_in, widen

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Trained:
    """What a step made, in groups, and `left`: what it may have written to besides, as it was behind the step."""

    made: dict[str, Tensors]
    left: Tensors

    def told(self, written: Sequence[str]) -> dict[str, Tensors]:
        """What is compared, where these names of `left` were written to by somebody."""
        found = {name: self.left[name] for name in written if name in self.left}
        return {**self.made, **({"written": found} if written else {})}


def written_by(steps: Sequence[Trained], before: Tensors) -> list[str]:
    """The names of `left` under which a step left something else than what was there before."""
    names = sorted({name for one in steps for name in one.left} | set(before))
    return [
        name for name in names
        if not all(name in one.left and name in before and same(one.left[name], before[name]) for one in steps)
    ]  # fmt: skip


def cloned(tensors: Tensors) -> Tensors:
    """The same in memory of its own."""
    return {name: t.detach().clone() for name, t in tensors.items()}


@torch.enable_grad()
def step(run: Callable[..., object], module: nn.Module, inputs: Sequence[Tensor]) -> Trained:
    """`run(*inputs)`, which computes what `module` does, forward and backward: the loss, the gradients of parameters
    and of floating inputs that it reaches, and the buffers as it leaves them. Where nothing of the result can be
    differentiated but parameters were written to, the module itself has gone backward: its results are compared.

    The loss weights every element of every floating result differently, so that no error cancels. It is given as the
    terms that it sums: of a single number eager's error is now and then nothing, by luck. Raises InputError if nothing
    of the result can be differentiated and nothing is written."""
    before = cloned(trained_in(module))
    given = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    results = [t for t in tree_leaves(_run(run, given)) if isinstance(t, Tensor)]
    made = _backward([t for t in results if t.requires_grad], module, given)
    left = cloned(trained_in(module))
    if not made:
        if not written_by([Trained({}, left)], before):
            raise InputError(
                "no result of the model can be differentiated", phase="check",
                hint="return (module, inputs), where the module returns what a loss is made of",
            )  # fmt: skip
        made = {"results": cloned({str(k): t for k, t in enumerate(results)})}
    return Trained({**made, "buffers": cloned(dict(module.named_buffers()))}, left)


def _backward(results: Sequence[Tensor], module: nn.Module, given: Sequence[Tensor]) -> dict[str, Tensors]:
    """The terms of a loss over `results`, and its gradients; nothing of no results."""
    if not results:
        return {}
    terms = [(t * _weights(t)).reshape(-1) for t in results]
    loss = torch.stack([one.sum().to(terms[0].dtype) for one in terms]).sum()
    wanted = {n: p for n, p in module.named_parameters() if p.requires_grad}
    wanted |= {f"input {n}": x for n, x in enumerate(given) if x.requires_grad}
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    reached: list[Tensor | None] = list(found)
    gradients = {n: g for n, g in zip(wanted, reached, strict=True) if g is not None}
    summands = torch.cat([one.detach().to(terms[0].dtype) for one in terms])
    return {"loss": {"": summands}, "gradients": gradients}


def _run(run: Callable[..., object], given: Sequence[Tensor]) -> object:
    """Forward. Raises InputError where the program writes to an input, which then gets no gradient."""
    try:
        return run(*given)
    except RuntimeError as error:
        if "leaf Variable" not in str(error):
            raise
        raise InputError(
            "the model writes to an input or a parameter that is to get a gradient", phase="check",
            hint="let it write to a clone, or check it without --backward",
        ) from error  # fmt: skip


def _weights(t: Tensor) -> Tensor:
    """Numbers between -1 and 1, the same in every precision but for rounding, and without an order: where they rise and
    fall together along a sum, its partial sums are far larger than its result, and how it is cut decides the error."""
    count = torch.arange(t.numel(), dtype=torch.float64, device=t.device)
    drawn = ((count * 12.9898 + 0.3).sin() * 43758.5453).frac()
    return drawn.reshape(t.shape).to(t.dtype) / max(1, t.numel()) ** 0.5


def in_training(module: nn.Module) -> nn.Module:
    """A copy in training mode, but for parts that draw random numbers: two runs of these cannot be compared."""
    copied = copy.deepcopy(module).train()
    for part in copied.modules():
        if isinstance(part, DRAWING):
            part.eval()
    return copied


DRAWING = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.RReLU, nn.MultiheadAttention, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d),
)


def in_eager(module: nn.Module, inputs: Sequence[Tensor]) -> Trained:
    """The step as torch runs it, on a copy."""
    copied = in_training(module)
    return step(copied, copied, inputs)


def in_double(module: nn.Module, inputs: Sequence[Tensor]) -> Trained:
    """The step on a copy in float64, from the same inputs. What the program itself narrows stays narrow."""
    copied = widen(in_training(module))
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return step(copied, copied, [x.double() if x.is_floating_point() else x for x in inputs])
    finally:
        torch.set_default_dtype(usual)
