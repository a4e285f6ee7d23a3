"""Tracebacks of what a program itself raises: its own frames, not those of whoever calls it."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch

_OURS = str(Path(__file__).parents[3])
_TORCH = str(Path(torch.__file__).parent)


def without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """`trace` without frames of this package, where what raised is a program that it called; itself where the error is
    ours or torch's."""
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    files = [t.tb_frame.f_code.co_filename for t in frames]
    last = max((k for k, f in enumerate(files) if f.startswith(_OURS)), default=-1)
    theirs = any(not f.startswith((_TORCH, "<")) for f in files[last + 1 :])
    kept: TracebackType | None = None
    for frame, file in reversed(list(zip(frames, files, strict=True))):
        if not (theirs and file.startswith(_OURS)):
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept
