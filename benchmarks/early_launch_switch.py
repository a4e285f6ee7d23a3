"""Turns early launches of compiled models on and off as they stand, so that the same kernels run in all modes."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any, Self
from unittest import mock

from tilewright.runtime.cuda import kernels
from tilewright.runtime.cuda.driver import opened

MODES = ("none", "own", "any")


class Switch:
    """Notes what is prepared inside. Models must be compiled for `any`."""

    def __init__(self) -> None:
        self._records: list[tuple[Any, int]] = []
        self._runs: list[Any] = []
        self._early: dict[int, int] = {}
        fill, bundle = kernels.CudaUnit._fill, kernels._Bundle.__init__

        def noted(unit: Any, record: Any, *rest: Any) -> Any:
            alive = fill(unit, record, *rest)
            self._records.append((record, record.outside))
            return alive

        def bundled(made: Any, run: Any, device: Any) -> None:
            self._runs.append(run)
            bundle(made, run, device)

        self._patches = (
            mock.patch.object(kernels.CudaUnit, "_fill", noted),
            mock.patch.object(kernels._Bundle, "__init__", bundled),
        )

    def __enter__(self) -> Self:
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for patch in self._patches:
            patch.stop()

    def set(self, mode: str) -> None:
        """From now on, graphs that were captured before excepted. Bundles are made anew."""
        for gpu in opened():
            for loaded in gpu._loaded.values():
                held: Any = loaded.held
                early = self._early.setdefault(loaded.address, held.early)
                held.early = early if mode != "none" else 0
            for run in self._runs:
                if run.bundle:
                    gpu.driver.native.tw_cuda_forget(ctypes.addressof(run))
                run.calls = 0
        for record, outside in self._records:
            record.outside = outside if mode == "any" else 0

    @property
    def early_kernels(self) -> str:
        """How many of the kernels that were loaded wait before they touch memory."""
        return f"{sum(map(bool, self._early.values()))} of {len(self._early)}"
