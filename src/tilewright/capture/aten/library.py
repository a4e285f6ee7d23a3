"""Why an op without a declaration is called in its library, for the coverage line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims.rng_prims import run_with_rng_state

from tilewright.ir.graph import CHECK

_REASONS: dict[str, str] = {
    "sort": "sort topk argsort kthvalue median nanmedian mode msort",
    "random": "rand randn randint randperm rand_like randn_like randint_like bernoulli native_dropout multinomial"
    " normal uniform exponential poisson rrelu_with_noise geometric cauchy log_normal",
    "data-dependent shape": "nonzero masked_select unique _unique2 unique_dim unique_consecutive unique_dim_consecutive"
    " repeat_interleave bincount _local_scalar_dense item",
    "scatter": "scatter scatter_add scatter_reduce index_put _unsafe_index_put index_add index_copy masked_scatter put"
    " index_reduce col2im embedding_dense_backward",
    CHECK: "_assert_scalar _assert_tensor_metadata _assert_async _linalg_check_errors",
    "recurrent": "lstm gru rnn_tanh rnn_relu mkldnn_rnn_layer _cudnn_rnn _thnn_fused_lstm_cell",
}
_BY_NAME = {name: reason for reason, names in _REASONS.items() for name in names.split()}


_ALIASING: dict[object, OpOverload] = {torch.ops.aten._unsafe_view.default: torch.ops.aten.view.default}
"""Ops whose schemas hide that their result is memory of an operand, with their equals whose schemas say so."""


BY_PLACE = "storage by place"
"""The reason of a call that addresses the storage of an operand by place, where no access map says the same."""

_BY_PLACE = frozenset("as_strided as_strided_copy as_strided_scatter resize".split())


def addresses_storage(target: OpOverload) -> bool:
    """Whether the op reads or shows places of its first operand's storage, whichever elements that operand has."""
    return target.namespace in ("aten", "prims") and target.overloadpacket.__name__ in _BY_PLACE


def library_target(target: object) -> object:
    """What is called for the op `target`."""
    return _ALIASING.get(target, target)


def any_strides(target: object) -> object:
    """What computes the same as the op `target` of an operand that may lie otherwise than in the program."""
    return torch.ops.aten.reshape.default if target is torch.ops.aten.view.default else target


def collective(target: object, args: Sequence[object], kwargs: Mapping[str, object]) -> str | None:
    """The group of processes among which `target` is a collective with these arguments; empty for one that waits for
    another, None for an op of this process alone."""
    if not isinstance(target, OpOverload):
        return None
    for place, argument in enumerate(target._schema.arguments):  # pyright: ignore[reportPrivateUsage]
        if argument.name == "group_name":
            found = args[place] if place < len(args) else kwargs.get("group_name", argument.default_value)
            return str(found) or "default"
    return "" if target.namespace.startswith("_c10d_functional") else None


def library_reason(target: object) -> str:
    """One or two words: why the op `target` has no declaration."""
    if target in (torch.get_rng_state, run_with_rng_state):
        return "random"
    if collective(target, (), {}) is not None:
        return "collective"
    if not isinstance(target, OpOverload):
        return "control flow" if isinstance(target, HigherOrderOperator) else "no declaration"
    name = target.overloadpacket.__name__
    if name in _BY_NAME:
        return _BY_NAME[name]
    if torch.Tag.nondeterministic_seeded in target.tags:
        return "random"
    if torch.Tag.dynamic_output_shape in target.tags:
        return "data-dependent shape"
    if name.startswith(("_fft", "fft", "view_as_complex", "view_as_real")):
        return "complex"
    if name.startswith(("_linalg", "linalg", "cholesky", "triangular_solve")):
        return "linear algebra"
    return "backward" if name.endswith(("_backward", "_backward_data")) else "no declaration"
