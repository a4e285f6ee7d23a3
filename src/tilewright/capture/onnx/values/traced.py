"""A value of a file while its graph is read: what is known of it, and where it lies."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import Tensor

from tilewright.capture.onnx.program import OnnxProgram

from .run import Host, as_host


class ValueKind(enum.Enum):
    """What is known about a value when the model is loaded."""

    CONST = "const"
    TENSOR = "tensor"
    MAYBE = "maybe"


@dataclass(eq=False)
class Val:
    """One value of the model: its kind, its slot in the owner's program, its tensor if constant.

    `narrow`: the tensor holds integers of fewer bits than its type, one to a byte.
    """

    kind: ValueKind
    owner: object | None = None
    slot: int = -1
    const: Tensor | None = None
    narrow: bool = False
    small: Host | None = None

    def host(self) -> Host:
        """The constant as a host value."""
        if self.small is None:
            made = as_host(self.const)
            assert isinstance(made, Host)
            self.small = made
        return self.small


@dataclass(frozen=True)
class Subgraph:
    """A body of If, Loop or Scan: its program and how many of its last inputs are captured values."""

    program: OnnxProgram
    captures: int
