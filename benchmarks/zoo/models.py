"""The models and their inputs: one entry per class of the packages' lists."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.small import PLANS, Plan, first_made, shrunk

MOST_WEIGHTS = 40_000_000
BATCH, LENGTH = 2, 12


@dataclass(frozen=True)
class Made:
    """A model with inputs that eager takes."""

    model: nn.Module
    inputs: Mapping[str, Tensor]
    kind: str
    plan: str

    @property
    def pixels(self) -> bool:
        """Whether memory formats concern it."""
        return any(t.dim() == 4 and t.is_floating_point() for t in self.inputs.values())


class LeftOut(Exception):
    """The rule does not take a class; says why."""


def names() -> list[str]:
    """Every class of every list that is installed, in the order of the lists."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    found = [f"transformers:{kind}" for kind in MODEL_MAPPING_NAMES]
    if importlib.util.find_spec("torchvision") is not None:
        from torchvision.models import list_models

        found += [f"torchvision:{name}" for name in list_models()]
    if importlib.util.find_spec("timm") is not None:
        import timm

        families = {name.split("_")[0].rstrip("0123456789"): name for name in reversed(timm.list_models())}
        found += [f"timm:{name}" for name in reversed(families.values())]
    return found


def made(name: str) -> Made:
    """The model of a name. Raises LeftOut where the rule does not take it."""
    package, _, kind = name.partition(":")
    torch.manual_seed(0)
    try:
        found = {"transformers": _transformer, "torchvision": _torchvision, "timm": _timm}[package](kind)
    except Exception as error:
        line = next(iter(str(error).strip().splitlines()), "")
        raise LeftOut(f"{type(error).__name__}: {line[:200]}") from error
    for part in found.model.modules():
        if re.search("Drop|Stochastic", type(part).__name__) and isinstance(getattr(part, "p", None), float):
            part.p = 0.0
        elif isinstance(getattr(part, "drop_prob", None), float):
            part.drop_prob = 0.0
    return found


def _checked(model: nn.Module, inputs: Mapping[str, Tensor], kind: str, plan: str) -> Made:
    """If eager takes the inputs, and gives numbers, the same with each seed: float64 draws other random numbers."""
    found: list[list[Tensor]] = []
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.no_grad():
            found.append(tensors(model.eval()(**inputs)))
    floats, again = ([t for t in results if t.is_floating_point()] for results in found)
    if not floats or not all(bool(t.isfinite().all()) for t in floats):
        raise LeftOut("its results are no finite floats")
    if any(
        a.shape != b.shape or not torch.allclose(a, b, 1e-3, 1e-3) for a, b in zip(floats, again, strict=True)
    ):
        raise LeftOut("its results are others with another seed")
    return Made(model, inputs, kind, plan)


def _light(model: nn.Module) -> nn.Module:
    count = sum(p.numel() for p in model.parameters())
    if count > MOST_WEIGHTS:
        raise LeftOut(f"{count} weights")
    return model


# --- transformers ---


def _transformer(kind: str) -> Made:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    title = MODEL_MAPPING_NAMES[kind]
    cls = getattr(transformers, title if isinstance(title, str) else title[0])

    def attempt(plan: Plan) -> Made:
        config = CONFIG_MAPPING[kind]()
        shrunk(config, plan)
        with torch.device("meta"):
            _light(cls(config))
        torch.manual_seed(0)
        model = cls(config).float()
        if getattr(model.config, "is_encoder_decoder", False) and hasattr(model.config, "use_cache"):
            model.config.use_cache = False
        failed: Exception | None = None
        for inputs in _inputs(model):
            try:
                return _checked(model, inputs, _family(model, inputs), plan.name)
            except Exception as error:  # noqa: BLE001 - other inputs may fit
                failed = failed or error
        raise failed or LeftOut("no inputs are known for it")

    return first_made(attempt)


def _family(model: Any, inputs: Mapping[str, Tensor]) -> str:
    """What a model is, told by its inputs and configuration."""
    if "pixel_values" in inputs:
        return "image and text" if "input_ids" in inputs else "vision"
    if any(n in inputs for n in ("input_values", "input_features", "audio_values")):
        return "audio"
    if getattr(model.config, "is_encoder_decoder", False):
        return "encoder-decoder"
    if hasattr(model.config, "state_size") or hasattr(model.config, "ssm_state_size"):
        return "state-space"
    text = inspect.getsource(type(model))
    return "decoder" if "causal" in text else "encoder"


def _sought(config: Any, name: str, default: int) -> int:
    """An attribute of a configuration or of one inside it."""
    value = getattr(config, name, None)
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    if isinstance(value, dict):
        value = value.get("height", default)
    if isinstance(value, int):
        return value
    for inner in vars(config).values():
        if hasattr(inner, "model_type"):
            found = _sought(inner, name, -1)
            if found > 0:
                return found
    return default


def _inputs(model: Any) -> list[dict[str, Tensor]]:
    """Inputs that the signature names, the likeliest set first."""
    config = model.config
    names = set(inspect.signature(model.forward).parameters)
    draw = torch.Generator().manual_seed(1)
    words = max(8, _sought(config, "vocab_size", 100))
    ids = torch.randint(4, min(words, 500), (BATCH, LENGTH), generator=draw)
    pixels = _sought(config, "image_size", 64)
    channels = _sought(config, "num_channels", 3)
    mels = _sought(config, "num_mel_bins", 80)
    frames = 2 * _sought(config, "max_source_positions", 50)
    image = torch.randn(BATCH, channels, pixels, pixels, generator=draw)
    known: dict[str, list[Tensor]] = {
        "input_ids": [ids], "decoder_input_ids": [ids[:, :7]], "pixel_values": [image],
        "input_values": [torch.randn(BATCH, 4000, generator=draw), torch.randn(BATCH, 1, 4000, generator=draw)],
        "input_features": [torch.randn(BATCH, *s, generator=draw) for s in ((mels, frames), (100, mels))],
    }  # fmt: skip
    main = getattr(model, "main_input_name", "input_ids")
    sets: list[tuple[str, ...]] = [
        (main,), (main, "decoder_input_ids"), ("input_ids", "pixel_values"), ("input_ids",), ("pixel_values",),
        ("input_ids", "decoder_input_ids"), ("input_values",), ("input_features",), ("input_ids", "input_features"),
    ]  # fmt: skip
    if getattr(config, "is_encoder_decoder", False):
        sets = [sets[1], *sets]
    made: list[dict[str, Tensor]] = []
    for wanted in dict.fromkeys(sets):
        if all(n in names and n in known for n in wanted):
            for k in range(max(len(known[n]) for n in wanted)):
                made.append({n: known[n][min(k, len(known[n]) - 1)] for n in wanted})
    return made


# --- torchvision and timm ---


class _Named(nn.Module):
    """A model of images that takes them by name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> object:
        """Whatever the model gives."""
        return self.model(pixel_values)


def _image_model(build: Callable[[], nn.Module]) -> Made:
    with torch.device("meta"):
        _light(build())
    torch.manual_seed(0)
    model = _Named(build())
    failed: Exception | None = None
    for size in (64, 96, 224, 256):
        image = torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(1))
        try:
            return _checked(model, {"pixel_values": image}, "vision", f"{size} pixels")
        except Exception as error:  # noqa: BLE001 - another size may fit
            failed = failed or error
    raise failed or LeftOut("no size fits")


def _torchvision(name: str) -> Made:
    from torchvision.models import get_model

    return _image_model(lambda: get_model(name, weights=None))


def _timm(name: str) -> Made:
    import timm

    return _image_model(lambda: timm.create_model(name, pretrained=False, num_classes=10))


def tensors(result: object) -> list[Tensor]:
    """The tensors of a result, in order."""
    from torch.utils._pytree import tree_leaves

    if isinstance(result, Mapping):
        result = list(result.values())
    return [t for t in tree_leaves(result) if isinstance(t, Tensor)]


__all__ = ["PLANS", "LeftOut", "Made", "made", "names", "tensors"]
