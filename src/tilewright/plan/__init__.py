"""What to run: buffers, launches, library calls, and how sizes are found from the inputs."""

from .data import (
    Binding,
    Buffer,
    CallStep,
    Copy,
    Home,
    Launch,
    Launches,
    Measure,
    Part,
    Plan,
    PlanSegment,
    Spec,
    View,
)

__all__ = [
    "Binding",
    "Buffer",
    "CallStep",
    "Copy",
    "Home",
    "Launch",
    "Launches",
    "Measure",
    "Part",
    "Plan",
    "PlanSegment",
    "Spec",
    "View",
]
