"""One training step as a program whose results can be compared: its loss, its gradients and its buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tilewright.errors import InputError

Result = dict[str, dict[str, Tensor]]


@torch.enable_grad()
def step(run: Callable[..., object], module: nn.Module, inputs: Sequence[Tensor]) -> Result:
    """`run(*inputs)`, which computes what `module` does, forward and backward: the loss, the gradients of parameters
    and of floating inputs that it reaches, and the buffers as it leaves them.

    The loss weights every element of every floating result differently, so that no error cancels. It is given as the
    terms that it sums: of a single number eager's error is now and then nothing, by luck. Raises InputError if nothing
    of the result can be differentiated."""
    given = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    results = [t for t in tree_leaves(_run(run, given)) if isinstance(t, Tensor) and t.requires_grad]
    if not results:
        raise InputError(
            "no result of the model can be differentiated", phase="check",
            hint="return (module, inputs), where the module returns what a loss is made of",
        )  # fmt: skip
    terms = [(t * _weights(t)).reshape(-1) for t in results]
    loss = torch.stack([one.sum().to(terms[0].dtype) for one in terms]).sum()
    wanted = {n: p for n, p in module.named_parameters() if p.requires_grad}
    wanted |= {f"input {n}": x for n, x in enumerate(given) if x.requires_grad}
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    reached: list[Tensor | None] = list(found)
    gradients = {n: g for n, g in zip(wanted, reached, strict=True) if g is not None}
    buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
    summands = torch.cat([one.detach().to(terms[0].dtype) for one in terms])
    return {"loss": {"": summands}, "gradients": gradients, "buffers": buffers}


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


def in_eager(module: nn.Module, inputs: Sequence[Tensor]) -> Result:
    """The step as torch runs it, on a copy."""
    copied = in_training(module)
    return step(copied, copied, inputs)


def in_double(module: nn.Module, inputs: Sequence[Tensor]) -> Result:
    """The step on a copy in float64, from the same inputs. What the program itself narrows stays narrow."""
    copied = in_training(module).double()
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return step(copied, copied, [x.double() if x.is_floating_point() else x for x in inputs])
    finally:
        torch.set_default_dtype(usual)
