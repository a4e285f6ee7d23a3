"""Where a graph runs: its device, and the machine that stands behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from tilewright.capture.placement.device import graph_device, host_inputs
from tilewright.errors import UnsupportedError
from tilewright.options import Options
from tilewright.runtime.cpu.toolchain import find_compiler
from tilewright.target import Target

from .backends import backend_of
from .build import Backend


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """The device of a graph, and which of its inputs are CPU tensors all the same."""

    device: str
    host: tuple[int, ...] = ()
    lazy_memory: bool = False
    """Whether memory is taken when it is needed: a pass of training on a GPU."""
    machine: Target | None = None
    """The machine that code is made for, which need not be here: nothing is timed or loaded. None: the device's own."""

    @property
    def backend(self) -> Backend:
        """What makes code run there. Raises UnsupportedError where nothing does."""
        found = backend_of(self.device)
        if found is None:
            raise UnsupportedError(
                f"no code is generated for {self.device}",
                phase="target",
                hint="move the model to a CPU or a GPU",
            )
        return found

    @property
    def ordinal(self) -> int | None:
        """The number of the device among its kind; None where it need not be here."""
        return None if self.machine is not None else torch.device(self.device).index or 0


def place_of(gm: fx.GraphModule, frozen: Mapping[str, Tensor], kind: str) -> DevicePlace:
    """Where a captured graph of this `kind` runs. Placeholders named in `frozen` are constants."""
    found = graph_device(gm)
    if found == "cpu":
        return DevicePlace(found)
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    live = [k for k, name in enumerate(names) if name not in frozen]
    outside = set(host_inputs(gm))
    host = tuple(i for i, k in enumerate(live) if k in outside)
    return DevicePlace(found, host, kind != "inference")


def find_missing(options: Options, where: str) -> str:
    """What keeps code from being generated; empty if nothing does. Either device needs a C++ compiler: kernels on the
    CPU, launches on a GPU."""
    if find_compiler(options) is None:
        return "no C++ compiler was found (install g++ or clang++)"
    backend = backend_of(where)
    return backend.missing(where) if backend is not None else f"no code is generated for {where}"


def machine_of(place: DevicePlace, options: Options) -> Target:
    """The target behind a place, as the options let it compute."""
    return place.machine or place.backend.target(place.device, options)
