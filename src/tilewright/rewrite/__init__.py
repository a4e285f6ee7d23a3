"""Graph to Graph: each step keeps the meaning, and names the law by which it does.

`normal` brings a graph into one form whatever way it was written, `algebra` moves factors over the border of a
reduction, `split` cuts reductions into parts that run side by side, `data_masks` lists what masks made of data leave.
"""

from tilewright.rewrite.normal.frozen_weights import freeze
from tilewright.rewrite.normal.normalise import Evaluate, interpret, normalise

__all__ = ["Evaluate", "freeze", "interpret", "normalise"]
