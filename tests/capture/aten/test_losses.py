"""Losses, forward and backward, in single and in half precision: generated, and as eager has them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilewright

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "cross_entropy": lambda x, y, t: F.cross_entropy(x, t),
    "cross_entropy, each": lambda x, y, t: F.cross_entropy(x, t, reduction="none"),
    "cross_entropy, weights": lambda x, y, t: F.cross_entropy(x, t, weight=y[0].abs()),
    "cross_entropy, ignored": lambda x, y, t: F.cross_entropy(x, t, ignore_index=3),
    "cross_entropy, smooth": lambda x, y, t: F.cross_entropy(x, t, label_smoothing=0.1),
    "cross_entropy, soft": lambda x, y, t: F.cross_entropy(x, y.softmax(-1)),
    "cross_entropy, images": lambda x, y, t: F.cross_entropy(x.view(4, 4, 12).transpose(1, 2), t.view(4, 4)),
    "nll": lambda x, y, t: F.nll_loss(x, t),
    "mse": lambda x, y, t: F.mse_loss(x, y),
    "l1": lambda x, y, t: F.l1_loss(x, y),
    "smooth_l1": lambda x, y, t: F.smooth_l1_loss(x, y),
    "huber": lambda x, y, t: F.huber_loss(x, y, delta=0.5),
    "bce": lambda x, y, t: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "bce_with_logits": lambda x, y, t: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "kl_div": lambda x, y, t: F.kl_div(F.log_softmax(x, -1), y.softmax(-1), reduction="batchmean"),
    "soft_margin": lambda x, y, t: F.soft_margin_loss(x, y.sign()),
    "triplet": lambda x, y, t: F.triplet_margin_loss(x, y, y.flip(0)),
}


@pytest.fixture(autouse=True)
def fresh() -> None:
    tilewright.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_generated(name: str, dtype: torch.dtype) -> None:
    loss, wide = LOSSES[name], dtype is torch.float32
    x, y = torch.randn(16, 12, dtype=dtype, requires_grad=True), torch.randn(16, 12, dtype=dtype)
    labels = torch.randint(0, 12, (16,))
    results: list[tuple[Tensor, Tensor]] = []
    for program in (loss, torch.compile(loss, backend="tilewright")):
        made = program(x, y, labels)
        (slope,) = torch.autograd.grad(made.sum(), x)
        results.append((made.detach(), slope))
    torch.testing.assert_close(
        results[1], results[0], rtol=1e-5 if wide else 2e-2, atol=1e-6 if wide else 2e-2
    )
    graphs = tilewright.compilations()
    assert sorted(g.kind for g in graphs) == ["backward", "forward"]
    assert [g.coverage.need for g in graphs] == [(), ()]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_slope_of_a_soft_margin_has_all_digits(reduction: str) -> None:
    """Where it is near 0, too."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.soft_margin_loss(x, y, reduction=reduction)

    y = torch.tensor([-1.0, 1.0]).repeat(40)
    x = y * torch.linspace(0, 40, 80)
    slopes: list[Tensor] = []
    for program, dtype in ((torch.compile(loss, backend="tilewright"), torch.float32), (loss, torch.float64)):
        given = x.detach().to(dtype).requires_grad_()
        (slope,) = torch.autograd.grad(program(given, y.to(dtype)).sum(), given)
        slopes.append(slope.double())
    torch.testing.assert_close(*slopes, rtol=4e-6, atol=0)


def test_labels_out_of_range_raise() -> None:
    def placed(x: Tensor, t: Tensor) -> Tensor:
        return torch.scatter(x * 2, 1, t[:, None], -1.0)

    def added(x: Tensor, t: Tensor) -> Tensor:
        return torch.scatter_add(x * 2, 1, t[:, None], x)

    x = torch.randn(4, 6)
    for program in (placed, added):
        compiled = tilewright.compile(program, (x, torch.tensor([0, 5, 2, 1])), strict=True)
        torch.testing.assert_close(
            compiled(x, torch.tensor([0, 5, 5, 1])), program(x, torch.tensor([0, 5, 5, 1]))
        )
        for bad in (6, -1):
            with pytest.raises(IndexError):
                compiled(x, torch.tensor([0, bad, 2, 1]))


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss])
def test_a_mean_over_no_elements_has_an_empty_gradient(loss: Callable[..., Tensor]) -> None:
    x, target = torch.zeros(0, 5, requires_grad=True), torch.zeros(0, 5)
    y = torch.compile(loss, backend="tilewright", dynamic=False)(x, target)
    y.backward()
    assert y.isnan()
    assert x.grad is not None and x.grad.shape == (0, 5)


@pytest.mark.parametrize("shape", [(10,), (), (3, 10)])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_loss_of_one_row_has_no_dim(shape: tuple[int, ...], reduction: str) -> None:
    """Torch declares one of size 1 for margins of many labels, by row."""
    x, target = torch.randn(shape, requires_grad=True), torch.zeros(shape, dtype=torch.int64)

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return F.multilabel_margin_loss(x, target, reduction=reduction)

    made, want = torch.compile(loss, backend="tilewright")(x, target), loss(x, target)
    torch.testing.assert_close(made, want)
    slopes = (torch.autograd.grad(y.sum(), x)[0] for y in (made, want))
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    ("sizes", "targets"),
    [
        ((3, 4), [[3, 0, -1, 1], [1, 2, 3, -1], [-1, 0, 1, 2]]),
        ((2, 4), [[0, 1, 2, 3], [2, 2, -1, -1]]),
        ((4,), [1, 3, -1, -1]),
    ],
)
def test_labels_behind_the_first_negative_one_are_no_targets(
    sizes: tuple[int, ...], targets: list[object], reduction: str
) -> None:
    """Torch's own parts let each of those count as one of class 0."""
    loss = nn.MultiLabelMarginLoss(reduction=reduction)
    target = torch.tensor(targets)
    x, y = (torch.linspace(-2, 3, math.prod(sizes)).sin().reshape(sizes).requires_grad_() for _ in range(2))
    mine, theirs = torch.compile(loss, backend="tilewright")(x, target), loss(y, target)
    torch.testing.assert_close(mine, theirs)
    mine.sum().backward()
    theirs.sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_torch_keeps_its_own_parts_of_losses() -> None:
    kernels = dict(torch.ops.aten.multilabel_margin_loss_forward.default.py_kernels)
    torch.compile(nn.MultiLabelMarginLoss(), backend="tilewright")(
        torch.ones(2, 3), torch.tensor([[0, -1, 1]] * 2)
    )
    assert torch.ops.aten.multilabel_margin_loss_forward.default.py_kernels == kernels


def test_such_a_loss_of_an_exported_program() -> None:
    x, target = torch.randn(3, 4), torch.tensor([[3, 0, -1, 1], [1, 2, 3, -1], [-1, 0, 1, 2]])
    loss = nn.MultiLabelMarginLoss(reduction="none")
    mine = tilewright.compile(torch.export.export(loss, (x, target)))(x, target)
    torch.testing.assert_close(mine, loss(x, target))
    torch.testing.assert_close(tilewright.compile(loss, (x, target))(x, target), loss(x, target))
