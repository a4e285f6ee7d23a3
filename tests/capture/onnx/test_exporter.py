"""Files written by torch's own exporter come back as the same function, with their dynamic sizes."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from tilewright.capture.onnx import OnnxModule, load

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

Args = tuple[Tensor, ...]


class Attention(nn.Module):
    """A causal block with sizes taken from its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 4, 8).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / 8**0.5
        hidden = torch.triu(torch.ones(t, t, dtype=torch.bool), 1)
        y = scores.masked_fill(hidden, -1e9).softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).reshape(b, t, d))


class Embedding(nn.Module):
    """Token and position tables, mean over time."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(50, 16), nn.Embedding(512, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.token(ids) + self.place(torch.arange(ids.shape[1]))[None]).mean(1)


class Upsampled(nn.Module):
    """Down, back up to the input's own size, joined."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.conv, self.mode = nn.Conv2d(3, 8, 3, 2, 1), mode

    def forward(self, x: Tensor) -> Tensor:
        aligned = None if self.mode == "nearest" else False
        y = F.interpolate(self.conv(x), size=x.shape[-2:], mode=self.mode, align_corners=aligned)
        return torch.cat([y, F.pad(x, (1, 1, 0, 0), mode="reflect")[..., 1:-1]], 1)


class Assorted(nn.Module):
    """Operators that need several nodes in the file."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        best = torch.topk(x, 3, 1).values
        return (
            x.cumsum(1),
            torch.gather(x, 1, torch.argsort(x, 1)),
            F.one_hot((x[:, 0] > 0).long(), 4).float(),
            torch.einsum("bi,bj->bij", x, best),
            torch.roll(x, 2, 1),
            torch.flip(x, [1]),
            x.unfold(1, 3, 2).mean(-1),
            x.clamp(min=0).pow(2.0).std(1),
            F.gelu(x),
            F.log_softmax(x, 1),
            torch.linalg.vector_norm(x, dim=1),
        )


def image(n: int, h: int, w: int) -> Args:
    """A batch of pictures."""
    return (torch.randn(n, 3, h, w),)


N, S, H, W = (
    Dim("n", min=2, max=64),
    Dim("s", min=2, max=256),
    Dim("h", min=8, max=256),
    Dim("w", min=8, max=256),
)
PICTURE: dict[int, object] = {0: N, 2: H, 3: W}
VISION = nn.Sequential(
    nn.Conv2d(3, 16, 3, 1, 1),
    nn.BatchNorm2d(16),
    nn.GroupNorm(4, 16),
    nn.SiLU(),
    nn.ConvTranspose2d(16, 8, 4, 2, 1),
    nn.InstanceNorm2d(8, affine=True),
    nn.Hardswish(),
    nn.AvgPool2d(3, 2, 1),
    nn.MaxPool2d(3, 2, 1),
    nn.PixelShuffle(2),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
)
CASES: dict[str, tuple[nn.Module, list[Args], dict[int, object]]] = {
    "attention": (Attention(), [(torch.randn(2, 7, 32),), (torch.randn(3, 9, 32),)], {0: N, 1: S}),
    "embedding": (
        Embedding(),
        [(torch.randint(0, 50, (2, 7)),), (torch.randint(0, 50, (3, 12)),)],
        {0: N, 1: S},
    ),
    "nearest": (Upsampled("nearest"), [image(2, 18, 22), image(3, 25, 32)], PICTURE),
    "bilinear": (Upsampled("bilinear"), [image(2, 18, 22), image(3, 25, 32)], PICTURE),
    "bicubic": (Upsampled("bicubic"), [image(2, 18, 22), image(3, 25, 32)], PICTURE),
    "vision": (VISION, [image(2, 20, 24), image(3, 32, 40)], PICTURE),
    "assorted": (Assorted(), [(torch.randn(3, 9),), (torch.randn(5, 9),)], {0: N}),
}


def written(module: nn.Module, args: Args, dims: Sequence[int], opset: int) -> onnx.ModelProto:
    """The file that torch writes."""
    file = io.BytesIO()
    axes = {"x": {d: f"d{d}" for d in dims}}
    with contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(
            module, args, file, opset_version=opset, input_names=["x"], dynamic_axes=axes, dynamo=False
        )
    return onnx.load_from_string(file.getvalue())


def same(a: object, b: object) -> None:
    """Equal up to rounding, output by output."""
    left = a if isinstance(a, tuple) else (a,)
    right = b if isinstance(b, tuple) else (b,)
    for x, y in zip(left, right, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [14, 18])
@pytest.mark.parametrize("name", CASES)
def test_round_trip(name: str, opset: int) -> None:
    module, inputs, dims = CASES[name]
    module = module.eval()
    torch.manual_seed(0)
    imported = load(written(module, inputs[0], list(dims), opset))
    assert isinstance(imported, OnnxModule) and not imported.data_dependent
    with torch.no_grad():
        for args in inputs:
            same(imported(*args), module(*args))
        if opset != 18:
            return
        program = torch.export.export(imported, inputs[0], dynamic_shapes=((dims,),), strict=False).module()
        for args in inputs:
            same(program(*args), module(*args))
