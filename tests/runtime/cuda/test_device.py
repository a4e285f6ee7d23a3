"""Which machine a GPU is, from what it says of itself; and what the package loads where there is none."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tilewright.errors import UnsupportedError
from tilewright.runtime.cuda import device
from tilewright.runtime.cuda.device import missing, target_of
from tilewright.target import MemoryKind, preset

H200 = {
    "major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 150_109_880_320, "L2_cache_size": 62_914_560,
    "shared_memory_per_block_optin": 232_448, "memory_clock_rate": 3_201_000, "memory_bus_width": 6016,
}  # fmt: skip


def test_a_known_device_is_its_preset_corrected() -> None:
    found = target_of(SimpleNamespace(**H200))
    base = preset("sm_90")
    assert found.name == "sm_90" and found.matrix_units == base.matrix_units and found.cores == 132
    assert found.device.capacity == H200["total_memory"] and found.core.capacity == 227 << 10
    assert found.device.bandwidth == pytest.approx(4.24e12, rel=0.01)


def test_another_device_is_the_nearest_older_preset() -> None:
    found = target_of(SimpleNamespace(**{**H200, "major": 8, "minor": 9, "multi_processor_count": 54}))
    base = preset("sm_80")
    assert (found.name, found.arch, found.backend) == ("sm_89", "89", "cuda")
    assert found.flops == pytest.approx(base.flops / 2) and found.lanes == 32
    newer = target_of(SimpleNamespace(**{**H200, "major": 12}))
    assert newer.matrix_units[0].shape == preset("sm_100").matrix_units[0].shape and newer.arch == "120"


def test_what_a_device_does_not_tell_stays() -> None:
    plain = SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=1 << 30)
    found, base = target_of(plain), preset("sm_90")
    assert found.device.bandwidth == base.device.bandwidth and found.device.capacity == 1 << 30
    assert found.level(MemoryKind.L2) == base.level(MemoryKind.L2) and found.core == base.core


def test_too_old_a_device() -> None:
    with pytest.raises(UnsupportedError, match="compute capability 7.5"):
        target_of(SimpleNamespace(**{**H200, "major": 7, "minor": 5}))


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.triton_compat, "version", lambda: "3.6.0")
    assert missing("cuda:0") == "" and "xpu" in missing("xpu:0")
    monkeypatch.setattr(device.triton_compat, "version", lambda: None)
    assert "Triton is not installed" in missing("cuda:0")
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "AMD" in missing("cuda:0")


def test_nothing_of_a_gpu_is_needed_for_the_cpu() -> None:
    text = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import torch, tilewright\n"
        "run = tilewright.compile(lambda x: x * 2 + 1, (torch.ones(8),))\n"
        "run(torch.ones(8))\n"
        "from tilewright.runtime.cuda import device, driver, workers\n"
        "assert 'not installed' in device.missing('cuda:0')\n"
        "print(driver._drivers, workers._held, torch.cuda.is_initialized())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.split() == ["[]", "{}", "False"], done.stderr
