"""Large results ask for large pages. (Whether the system has any to give is its own affair.)"""

from __future__ import annotations

import mmap

import pytest
import torch

from tilewright.runtime.cpu import huge_pages
from tilewright.runtime.plan.tensors import empty_strided


def test_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(huge_pages, "_advise", lambda: lambda *a: asked.append(a) or 0)
    make = huge_pages.large_maker(empty_strided)
    make((100,), (1,), torch.float32)
    assert asked == []
    t = make((3 << 20,), (1,), torch.float32)
    ((start, length, advice),) = asked
    assert advice == mmap.MADV_HUGEPAGE
    assert start % huge_pages.LARGE_PAGE_BYTES == 0 and length % huge_pages.LARGE_PAGE_BYTES == 0
    assert t.data_ptr() <= start and start + length <= t.data_ptr() + t.nbytes


def test_a_system_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_advise", lambda: None)
    assert huge_pages.on_large_pages(torch.ones(1 << 21)).sum() == 1 << 21
