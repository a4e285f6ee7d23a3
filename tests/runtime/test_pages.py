"""Large results in large pages, where the system has them."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

import tilewright
from tilewright.runtime import pages
from tilewright.runtime.tensors import empty_strided


def in_large_pages(t: torch.Tensor) -> int:
    """Bytes of the mappings around `t` that the system holds in large pages."""
    address, found, inside = t.data_ptr() + t.nbytes // 2, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) << 10
    return found


def supported() -> bool:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False
    return "[never]" not in text and sys.platform == "linux"


@pytest.mark.skipif(not supported(), reason="this system has no transparent large pages")
def test_a_large_result_comes_in_large_pages() -> None:
    f = tilewright.compile(lambda x: x * 2, (torch.randn(1 << 22),))
    x = torch.randn(1 << 22)
    y = f(x)
    assert torch.equal(y, x * 2)
    assert in_large_pages(y) >= y.nbytes // 2


def test_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(pages, "_advise", lambda: lambda *a: asked.append(a) or 0)
    make = pages.large_maker(empty_strided)
    make((100,), (1,), torch.float32)
    assert asked == []
    t = make((3 << 20,), (1,), torch.float32)
    ((start, length, advice),) = asked
    assert advice == mmap.MADV_HUGEPAGE
    assert start % pages.PAGE == 0 and length % pages.PAGE == 0
    assert t.data_ptr() <= start and start + length <= t.data_ptr() + t.nbytes


def test_a_system_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_advise", lambda: None)
    assert pages.on_large_pages(torch.ones(1 << 21)).sum() == 1 << 21
