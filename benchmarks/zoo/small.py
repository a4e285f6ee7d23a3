"""Small configurations, made generically: which attributes of a configuration are counts, widths and sizes is told by
their names. No model is known here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LAYERS = re.compile(
    r"(^|_)(num_(\w+_)?(layers|blocks)|n_layers?|(\w+_)?layers|depth|num_hidden_groups|n_blocks|num_encoder_blocks)$"
)
NO_LAYERS = re.compile(
    r"(skip|no_|fusion|feature|extract|conv|adapter_layer|drop|prob|out|index|which|tie|mlp_only|quant)"
)
VOCABULARY = re.compile(r"(^|_)vocab_size$|^vocab_size_")
WIDTHS = {
    name: size
    for size, names in {
        2: "num_key_value_heads ",
        4: (
            "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
            "num_experts n_routed_experts num_local_experts "
        ),
        16: "head_dim d_kv kv_channels attention_head_size ",
        48: "moe_intermediate_size ",
        64: "hidden_size d_model n_embd embed_dim embedding_size dim projection_dim word_embed_proj_dim ",
        96: (
            "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner ffn_hidden_size "
            "expansion_dim "
        ),
        128: "d_inner ",
    }.items()
    for name in names.split()
}
"""Attributes that plan `narrow` sets, if they are larger."""
EXPERTS = re.compile(r"^(num_experts|n_routed_experts|num_local_experts|moe_num_experts)$")
WORDS = 512
PIXELS = 64


@dataclass(frozen=True)
class Plan:
    """How a configuration is made small."""

    name: str
    narrow: bool
    image: bool


PLANS = (Plan("narrow", True, True), Plan("short, small images", False, True), Plan("short", False, False))
"""The first with which a model can be made and run is taken."""


def shrunk(config: Any, plan: Plan) -> None:
    """Make a configuration small in place, and those inside it."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrunk(value, plan)
        elif isinstance(value, int) and not isinstance(value, bool):
            _set(config, name, _number(name, value, plan))
        elif isinstance(value, (list, tuple)) and name in ("depths", "num_blocks", "depth") and value:
            _set(config, name, type(value)(min(v, 2) if isinstance(v, int) else v for v in value))
        elif isinstance(value, float) and re.search(r"(drop|mask_\w*prob|layerdrop)", name):
            _set(config, name, 0.0)
        elif isinstance(value, list) and name == "layer_types":
            _set(config, name, value[:2])
    for name in (
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "decoder_start_token_id",
        "mask_token_id",
        "sep_token_id",
    ):
        value = getattr(config, name, None)
        if isinstance(value, int) and value >= WORDS:
            _set(config, name, 3)
    for name, off in (("use_cache", False), ("output_attentions", False), ("apply_spec_augment", False)):
        if hasattr(config, name):
            _set(config, name, off)


def _set(config: Any, name: str, value: object) -> None:
    if getattr(config, name, None) != value:
        try:
            setattr(config, name, value)
        except (AttributeError, NotImplementedError, ValueError, TypeError):
            return


def _number(name: str, value: int, plan: Plan) -> int:
    if VOCABULARY.search(name):
        return min(value, WORDS)
    if LAYERS.search(name) and not NO_LAYERS.search(name):
        return min(value, 2)
    if EXPERTS.search(name):
        return min(value, 4)
    if plan.image and name == "image_size":
        return min(value, PIXELS)
    if plan.narrow and name in WIDTHS:
        return min(value, WIDTHS[name])
    return value


def first_made(make: Callable[[Plan], Any]) -> Any:
    """What the first plan makes that raises nothing; the first error if all raise."""
    errors: list[Exception] = []
    for plan in PLANS:
        try:
            return make(plan)
        except Exception as error:  # noqa: BLE001 - whatever a model refuses a plan with
            errors.append(error)
    raise errors[-1]
