"""The meaning of the IRs, slow and plain: over floats, and over an exact element type."""

from .algebra import FLOATS, REALS, Algebra, Array, Floats
from .exact import ELEMENT, EXACT, ResidueError, equal, exact_random
from .graph import run_graph, run_values
from .program import run_program

__all__ = [
    "ELEMENT",
    "EXACT",
    "FLOATS",
    "REALS",
    "Algebra",
    "Array",
    "Floats",
    "ResidueError",
    "equal",
    "exact_random",
    "run_graph",
    "run_program",
    "run_values",
]
