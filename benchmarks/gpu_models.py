"""The networks of the GPU benchmark, with random weights, from whichever package has them.

The first source that is installed counts and is recorded. Random weights change no running time as long as
no value overflows; the statistics of batch norms, taken from a pass, make sure of that.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from benchmarks.calibrate import calibrate
from tilewright import measure

SEQUENCE = 128
VOCABULARY = 30522
LABELS = 1000


class Only(nn.Module):
    """A transformers model of one input that returns one tensor."""

    def __init__(self, model: nn.Module, keyword: str, result: str) -> None:
        super().__init__()
        self.model = model
        self.keyword = keyword
        self.result = result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is the model's main input: token ids or pixels."""
        return getattr(self.model(**{self.keyword: x}), self.result)


Source = tuple[str, Callable[[], nn.Module]]


@dataclass(frozen=True)
class Network:
    """Where a network may come from, in order, and what it is fed with."""

    sources: tuple[Source, ...]
    pixels: int = 224
    """Side of the image; 0: token ids."""
    convolutional: bool = True
    """Whether channels-last is worth a try."""

    def inputs(self, batch: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Random inputs of one batch."""
        if not self.pixels:
            return torch.randint(0, VOCABULARY, (batch, SEQUENCE), device=device)
        return torch.randn(batch, 3, self.pixels, self.pixels, device=device, dtype=dtype)


@dataclass(frozen=True)
class Loaded:
    """A network in eval mode on its device, and the package that it came from."""

    model: nn.Module
    source: str


def load(network: Network, device: torch.device, dtype: torch.dtype) -> Loaded:
    """The network from the first source that works. Raises `LookupError` with every source's reason."""
    reasons: list[str] = []
    for source, make in network.sources:
        torch.manual_seed(0)
        try:
            model = make()
        except Exception as error:  # noqa: BLE001 - the next source may have it
            reasons.append(f"{source}: {measure.one_line(error)}")
            continue
        model = model.to(device)
        if network.pixels:
            calibrate(model, network.inputs(8, device, torch.float32))
        return Loaded(model.eval().requires_grad_(False).to(dtype), source)
    raise LookupError("; ".join(reasons))


def _torchvision(name: str) -> Source:
    def make() -> nn.Module:
        return getattr(importlib.import_module("torchvision.models"), name)(weights=None)

    return "torchvision", make


def _timm(name: str) -> Source:
    return "timm", lambda: importlib.import_module("timm").create_model(name, pretrained=False)


def _transformers(
    name: str, keyword: str = "pixel_values", result: str = "logits", **settings: object
) -> Source:
    """`name` is the part of the class names before `Config`; the head is the one for images, if any."""

    def make() -> nn.Module:
        package = importlib.import_module("transformers")
        plain = result == "last_hidden_state"
        labels = {} if plain else {"num_labels": LABELS}
        configuration = getattr(package, f"{name}Config")(**settings, **labels)
        head = "Model" if plain else "ForImageClassification"
        extra = {"add_pooling_layer": False} if name == "Bert" else {}
        return Only(getattr(package, name + head)(configuration, **extra), keyword, result)

    return "transformers", make


_RESNET_34: Mapping[str, object] = {
    "layer_type": "basic",
    "depths": [3, 4, 6, 3],
    "hidden_sizes": [64, 128, 256, 512],
}
_VIT_SMALL: Mapping[str, object] = {
    "hidden_size": 384,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "patch_size": 32,
}

NETWORKS: Mapping[str, Network] = MappingProxyType(
    {
        "mobilenet_v2": Network((_torchvision("mobilenet_v2"), _transformers("MobileNetV2"))),
        "resnet34": Network((_torchvision("resnet34"), _transformers("ResNet", **_RESNET_34))),
        "resnet50": Network((_torchvision("resnet50"), _transformers("ResNet"))),
        "swin_t": Network((_torchvision("swin_t"), _transformers("Swin")), convolutional=False),
        "vit_small_patch32": Network(
            (_timm("vit_small_patch32_224"), _transformers("ViT", **_VIT_SMALL)), convolutional=False
        ),
        "convnext_tiny": Network((_torchvision("convnext_tiny"), _transformers("ConvNext"))),
        "mobilevit_s": Network(
            (_timm("mobilevit_s"), _transformers("MobileViT", image_size=256)), pixels=256
        ),
        "bert_base": Network(
            (_transformers("Bert", "input_ids", "last_hidden_state"),), pixels=0, convolutional=False
        ),
    }
)
