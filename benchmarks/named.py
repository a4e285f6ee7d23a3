"""The named models: two with real weights from the demo's files, the others with random weights from fixed
seeds.

Random weights change no running time on a CPU as long as no value overflows or becomes denormal, which the
statistics of batch norms, taken from a few passes, make sure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from PIL import Image

from benchmarks.calibrate import calibrate
from benchmarks.record import MODELS, ROOT
from demo import ocr, search, weights
from tilewright.measure import Workload

PICTURE = ROOT / "demo" / "picture.png"


class Hidden(torch.nn.Module):
    """A transformers model that returns its last hidden state only."""

    def __init__(self, model: torch.nn.Module, keyword: str) -> None:
        super().__init__()
        self.model = model
        self.keyword = keyword

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is the model's main input: token ids or pixels."""
        return self.model(**{self.keyword: x}).last_hidden_state


@dataclass(frozen=True)
class Entry:
    """A named model: what it is, and how its workload is built."""

    title: str
    build: Callable[[], Workload]


def _ocr(part: str, inputs: Callable[[], torch.Tensor]) -> Callable[[], Workload]:
    def build() -> Workload:
        weights.obtain(weights.OCR, MODELS, report=lambda text: None)
        return Workload(part, MODELS / "ocr" / f"{part}.onnx", (inputs(),))

    return build


def _page(width: int, height: int) -> torch.Tensor:
    with Image.open(PICTURE) as picture:
        return torch.from_numpy(ocr.detection_input(picture.convert("RGB").resize((width, height))))


def _strips(width: int) -> torch.Tensor:
    """Six strips of the picture, as lines of text."""
    with Image.open(PICTURE) as picture:
        parts = [picture.convert("RGB").crop((60, top, 60 + width, top + 48)) for top in range(210, 640, 75)]
    return torch.from_numpy(ocr.line_input(parts[:6], width))


def _sentences() -> Workload:
    weights.obtain(weights.SENTENCES, MODELS, report=lambda text: None)
    embedder, _ = search.load(MODELS / "sentences")
    torch.manual_seed(0)
    ids = torch.randint(1000, 30000, (8, 64))
    lengths = torch.tensor([64, 60, 48, 64, 31, 64, 17, 55])
    mask = (torch.arange(64) < lengths[:, None]).long()
    return Workload("minilm", embedder, (ids * mask, mask))


def _tokens(
    name: str, make: Callable[[], torch.nn.Module], length: int, vocabulary: int
) -> Callable[[], Workload]:
    def build() -> Workload:
        torch.manual_seed(0)
        model = Hidden(make(), "input_ids").eval()
        return Workload(name, model, (torch.randint(0, vocabulary, (1, length)),))

    return build


def _pixels(name: str, make: Callable[[], torch.nn.Module]) -> Callable[[], Workload]:
    def build() -> Workload:
        torch.manual_seed(0)
        model = Hidden(make(), "pixel_values")
        calibrate(model, torch.randn(4, 3, 224, 224))
        return Workload(name, model.eval(), (torch.randn(1, 3, 224, 224),))

    return build


def _bert() -> torch.nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(), add_pooling_layer=False)


def _llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaModel

    size = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16}
    return LlamaModel(LlamaConfig(**size, vocab_size=32000, use_cache=False))


def _resnet() -> torch.nn.Module:
    from transformers import ResNetConfig, ResNetModel

    return ResNetModel(ResNetConfig())


def _convnext() -> torch.nn.Module:
    from transformers import ConvNextConfig, ConvNextModel

    return ConvNextModel(ConvNextConfig())


def _mobilenet() -> torch.nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2Model

    return MobileNetV2Model(MobileNetV2Config())


def _swin() -> torch.nn.Module:
    from transformers import SwinConfig, SwinModel

    return SwinModel(SwinConfig())


ZOO: Mapping[str, Entry] = MappingProxyType(
    {
        "ocr-detection-640": Entry("OCR detection, 1x3x640x640", _ocr("detection", lambda: _page(640, 640))),
        "ocr-detection-wide": Entry("OCR detection, 1x3x480x800", _ocr("detection", lambda: _page(800, 480))),
        "ocr-recognition": Entry("OCR recognition, 6x3x48x320", _ocr("recognition", lambda: _strips(320))),
        "ocr-classification": Entry(
            "OCR classification, 6x3x48x192", _ocr("classification", lambda: _strips(192))
        ),
        "minilm": Entry("MiniLM-L6 sentence embedding, 8x64 tokens", _sentences),
        "bert-base": Entry("BERT-base, 1x128 tokens", _tokens("bert-base", _bert, 128, 30522)),
        "llama": Entry("Llama, 4 layers, 1024 wide, 1x512 tokens", _tokens("llama", _llama, 512, 32000)),
        "resnet-50": Entry("ResNet-50, 1x3x224x224", _pixels("resnet-50", _resnet)),
        "convnext-t": Entry("ConvNeXt-T, 1x3x224x224", _pixels("convnext-t", _convnext)),
        "mobilenet-v2": Entry("MobileNetV2, 1x3x224x224", _pixels("mobilenet-v2", _mobilenet)),
        "swin-t": Entry("Swin-T, 1x3x224x224", _pixels("swin-t", _swin)),
    }
)
