"""Rewriting of graphs: identities, normal form, folding of frozen weights."""

from .freeze import freeze
from .normalise import Evaluate, interpret, normalise

__all__ = ["Evaluate", "freeze", "interpret", "normalise"]
