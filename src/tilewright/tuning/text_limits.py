"""How much of a text people are shown. A file of its own: errors are imported before anything else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextLimits:
    """What people read."""

    max_name_characters: int = 120
    """Characters of a name in a model that are shown."""
    table_columns: int = 200
    """Columns of a table where the output is no terminal, so that nothing is folded in a log."""
    max_message_characters: int = 4000
    """Characters of an error's message that are shown."""
    max_place_characters: int = 400
    """Characters of each other part of an error that are shown."""
    max_explained_steps: int = 10
    """Kernels and calls that `explain` shows unless all are asked for."""
    bytes_told_from: float = 1.05
    """How many times the least bytes a kernel moves before that is said of the slowest one."""
    max_shown_graphs: int = 10
    """Graphs of a model that a notebook shows."""
    max_listed_inputs: int = 8
    """Inputs of a graph whose types are listed in its line."""
    max_named_ops: int = 4
    """Ops that are named beside a reason."""
    least_expected_seconds: float = 1.0
    """What took less is not remembered: nobody waits for an estimate."""
    max_expected: int = 100
    """Things of which it is remembered how long they took."""
    max_expected_bytes: int = 1 << 20
    """Of the file where that stands."""


TEXTS = TextLimits()
