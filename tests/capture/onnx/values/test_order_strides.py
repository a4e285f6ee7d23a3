"""Strides of symbolic sizes in a known order."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tilewright.capture.onnx.values.run import order_strides


def symbolic(t: Tensor) -> Tensor:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    kinds = [DimDynamic.DYNAMIC] * t.dim()
    return mode.from_tensor(t, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))


def test_what_is_proved_once_is_known() -> None:
    known: set[tuple[object, ...]] = set()
    x = symbolic(torch.empty(5, 6, 7))
    assert order_strides(x, known) is x
    assert len(known) == 1
    y = x + 1
    assert order_strides(y, known) is y
    assert len(known) == 1


def test_strides_of_no_known_order_are_never_known() -> None:
    known: set[tuple[object, ...]] = set()
    x = symbolic(torch.empty(5, 6, 7)).permute(2, 0, 1)
    for _ in range(2):
        assert order_strides(x, known).is_contiguous()
    assert not known


def test_static_strides_are_left() -> None:
    x = torch.empty(3, 4).t()
    assert order_strides(x, set()) is x
