"""Ops that read as many elements as another operand says: operands that do not fit are told, fake ones too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import export

from tilewright.capture.harmless.operands import fits
from tilewright.capture.harmless.ops import unknown_calls

aten = torch.ops.aten
Q, K = torch.ones(2, 4, 3, 8), torch.ones(2, 2, 5, 8)
IMAGE = torch.ones(2, 6, 4, 4)
CASES: dict[str, tuple[object, tuple[object, ...], bool]] = {
    "attention": (aten.scaled_dot_product_attention.default, (Q, K, K), True),
    "fewer values": (aten.scaled_dot_product_attention.default, (Q, K, K[:, :, :2]), False),
    "at once": (aten._scaled_dot_product_flash_attention_for_cpu.default, (Q, K, K), True),
    "fewer batches": (aten._scaled_dot_product_flash_attention_for_cpu.default, (Q, K[:1], K[:1]), False),
    "fewer heads of values": (aten._scaled_dot_product_flash_attention_for_cpu.default, (Q, K, K[:, :1]), False),
    "norm": (aten._native_batch_norm_legit_no_training.default, (IMAGE, *[torch.ones(6)] * 4, 0.1, 1e-5), True),
    "a single mean": (
        aten._native_batch_norm_legit_no_training.default,
        (IMAGE, None, None, torch.ones(1), torch.ones(6), 0.1, 1e-5), False,
    ),
    "resize": (aten._upsample_bilinear2d_aa.default, (IMAGE, [2, 3], False, 0.5, 0.75), True),
    "behind the last": (aten._upsample_bilinear2d_aa.default, (IMAGE, [99, 99], False, 0.5, 0.5), False),
    "bags": (aten._embedding_bag.default, (IMAGE[0, 0], torch.arange(3), torch.zeros(1, dtype=torch.int64)), True),
    "no bags": (
        aten._embedding_bag.default,
        (IMAGE[0, 0], torch.arange(3), torch.zeros(0, dtype=torch.int64), False, 2), False,
    ),
    "elements apart": (
        aten._scaled_dot_product_flash_attention_for_cpu.default, (Q[..., :1].expand(Q.shape), Q, Q), False,
    ),
    "no keys": (aten._scaled_dot_product_flash_attention_for_cpu.default, (Q, K[:, :, :0], K[:, :, :0]), False),
    "others": (aten.relu.default, (IMAGE,), True),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
def test_operands_that_do_not_fit_are_told(what: str) -> None:
    op, args, want = CASES[what]
    assert fits(op, args, {}) is want  # type: ignore[arg-type]


class Attends(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("values", [5, 2])
def test_graphs_show_that_operands_fit(values: int) -> None:
    program = export(Attends(), (Q, Q + 1, Q + 2))
    nodes = list(program.graph.nodes)
    nodes[1].meta["val"], nodes[2].meta["val"] = K, K[:, :, :values]
    nodes[0].meta["val"] = Q
    assert list(unknown_calls(program.graph_module)) == ([] if values == 5 else [str(nodes[3].target)])
