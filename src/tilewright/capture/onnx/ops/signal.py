"""Fourier transforms, windows, the mel filter bank."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewright.capture.onnx.registry import op
from tilewright.capture.onnx.values.run import Host, check_size, torch_dtype


def _complex(x: Tensor) -> Tensor:
    """[..., 1] or [..., 2] as a complex (or real) tensor without the last dim."""
    if x.shape[-1] == 1:
        return x.squeeze(-1)
    return torch.view_as_complex(x.contiguous())


def _transform(x: Tensor, length: int | None, axis: int, inverse: int, onesided: int) -> Tensor:
    axis = axis + x.dim() if axis < 0 else axis
    half = x.dtype in (torch.float16, torch.bfloat16)
    signal = _complex(x.to(torch.float32) if half else x)
    if onesided and inverse:
        full = torch.fft.irfft(signal, n=length, dim=axis)
        return full.unsqueeze(-1).to(x.dtype)
    if onesided and not signal.is_complex():
        y = torch.fft.rfft(signal, n=length, dim=axis)
    elif inverse:
        y = torch.fft.ifft(signal, n=length, dim=axis)
    else:
        y = torch.fft.fft(signal, n=length, dim=axis)
        if onesided:
            y = y.narrow(axis, 0, y.shape[axis] // 2 + 1)
    return torch.view_as_real(y).to(x.dtype)


@op("DFT", since=17, host=(1,))
def dft_17(
    x: Tensor, length: Host | None = None, *, axis: int = 1, inverse: int = 0, onesided: int = 0
) -> Tensor:
    """Discrete Fourier transform (opset 17: axis as attribute)."""
    return _transform(x, None if length is None else length.int(), axis, inverse, onesided)


@op("DFT", since=20, host=(1, 2))
def dft(
    x: Tensor, length: Host | None = None, axis: Host | None = None, *, inverse: int = 0, onesided: int = 0
) -> Tensor:
    """Discrete Fourier transform along one axis; the last dim holds real and imaginary parts."""
    place = -2 if axis is None else axis.int()
    return _transform(x, None if length is None else length.int(), place, inverse, onesided)


@op("STFT", since=17, host=(1, 3))
def stft(
    signal: Tensor,
    step: Host,
    window: Tensor | None = None,
    frame_length: Host | None = None,
    *,
    onesided: int = 1,
) -> Tensor:
    """Fourier transforms of overlapping frames."""
    if frame_length is not None:
        size = frame_length.int()
    else:
        size = signal.shape[1] if window is None else window.shape[0]
    frames = _complex(signal).unfold(1, size, step.int())
    if window is not None:
        frames = frames * window
    if onesided and not frames.is_complex():
        y = torch.fft.rfft(frames, dim=-1)
    else:
        y = torch.fft.fft(frames, dim=-1)
        y = y[..., : size // 2 + 1] if onesided else y
    return torch.view_as_real(y)


def _window(size: int, periodic: int, terms: tuple[float, ...], code: int, device: torch.device) -> Tensor:
    check_size([size], "Window")
    n = torch.arange(size, dtype=torch.float64, device=device)
    angle = n * (2 * math.pi / max(size if periodic else size - 1, 1))
    total = torch.zeros_like(n)
    for k, a in enumerate(terms):
        total = total + (-1) ** k * a * torch.cos(angle * k)
    return total.to(torch_dtype(code))


@op("HannWindow", since=17, host=(0,))
def hann_window(size: Host, *, output_datatype: int = 1, periodic: int = 1, device: torch.device) -> Tensor:
    """Raised cosine."""
    return _window(size.int(), periodic, (0.5, 0.5), output_datatype, device)


@op("HammingWindow", since=17, host=(0,))
def hamming_window(
    size: Host, *, output_datatype: int = 1, periodic: int = 1, device: torch.device
) -> Tensor:
    """Raised cosine on a pedestal."""
    return _window(size.int(), periodic, (25 / 46, 1 - 25 / 46), output_datatype, device)


@op("BlackmanWindow", since=17, host=(0,))
def blackman_window(
    size: Host, *, output_datatype: int = 1, periodic: int = 1, device: torch.device
) -> Tensor:
    """Three-term cosine window."""
    return _window(size.int(), periodic, (0.42, 0.5, 0.08), output_datatype, device)


@op("MelWeightMatrix", since=17, host=(0, 1, 2, 3, 4))
def mel_weights(
    bins: Host,
    dft_length: Host,
    sample_rate: Host,
    lower: Host,
    upper: Host,
    *,
    output_datatype: int = 1,
    device: torch.device,
) -> Tensor:
    """Triangular bands, evenly spaced on the mel scale: [dft_length / 2 + 1, bins]."""
    count, size, rate = bins.int(), dft_length.int(), sample_rate.int()
    low, high = float(lower.item()), float(upper.item())
    rows = size // 2 + 1
    check_size([rows, count], "MelWeightMatrix")
    low_mel, high_mel = (2595 * math.log10(1 + f / 700) for f in (low, high))
    step = (high_mel - low_mel) / (count + 2)
    mel = torch.arange(count + 2, dtype=torch.float64, device=device) * step + low_mel
    hertz = 700 * (torch.pow(10.0, mel / 2595) - 1)
    edge = torch.floor((size + 1) * hertz / rate)
    row = torch.arange(rows, dtype=torch.float64, device=device).unsqueeze(1)
    left, centre, right = edge[:-2], edge[1:-1], edge[2:]
    rise = torch.where(centre == left, (row == centre).to(torch.float64), (row - left) / (centre - left))
    fall = (right - row) / (right - centre)
    inside = (row >= left) & (row <= centre)
    after = (row > centre) & (row < right)
    zero = torch.zeros_like(row)
    return torch.where(inside, rise, torch.where(after, fall, zero)).to(torch_dtype(output_datatype))
