"""Short pieces of work on a GPU, recorded to be replayed in turns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator

import torch

from tilewright.errors import UnsupportedError
from tilewright.runtime.cuda.driver import Device, capturing_on, current_stream
from tilewright.runtime.cuda.graph import recover
from tilewright.runtime.plan.launch import raise_error


class StepRecorder:
    """Records short pieces of work on one device, for callers that replay them in turns."""

    def __init__(self, ordinal: int, device: Device | None, checked: bool) -> None:
        """`device` may be None where nothing that is recorded is a kernel of ours; `checked` says whether one of them
        may find something wrong."""
        self.checked = checked
        self._ordinal = ordinal
        self._device = device
        self._capturing = capturing_on(ordinal)
        self._side: torch.cuda.Stream | None = None

    def ready(self, before: int) -> int | None:
        """The stream on which replays may run now; None while the caller captures. Waits for the stream `before`, which
        used their memory last (-1: none), if it is another. Raises what an earlier kernel found wrong."""
        if self._capturing():
            return None
        code = self._device.failed() if self._device is not None else 0
        if code:
            raise_error(code)
        stream = current_stream(self._ordinal)
        if before not in (-1, stream):
            torch.cuda.synchronize(self._ordinal)
        return stream

    @contextlib.contextmanager
    def rehearsal(self) -> Generator[None]:
        """What runs inside leaves the device's random numbers as they were."""
        before = torch.cuda.get_rng_state(self._ordinal)
        try:
            yield
        finally:
            torch.cuda.set_rng_state(before, self._ordinal)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """What does the same again. Raises RuntimeError where it cannot be captured; nothing else is then lost."""
        with torch.cuda.device(self._ordinal):
            if self._side is None:
                self._side = torch.cuda.Stream()
            graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            try:
                with torch.cuda.graph(graph, stream=self._side, capture_error_mode="thread_local"):
                    run()
            except (RuntimeError, UnsupportedError):
                recover(before)
                raise

        def replay() -> None:
            with torch.cuda.device(self._ordinal):
                graph.replay()

        return replay
