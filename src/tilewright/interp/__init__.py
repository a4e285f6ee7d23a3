"""The meaning of the IRs, slow and plain: over floats, and over an exact element type."""

from .algebra import FLOATS, REALS, Algebra, Array, Floats
from .graph import run_graph, run_values

__all__ = ["FLOATS", "REALS", "Algebra", "Array", "Floats", "run_graph", "run_values"]
