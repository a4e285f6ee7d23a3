"""Rewriting of graphs: identities, normal form, folding of frozen weights."""

from .normalise import Evaluate, interpret, normalise

__all__ = ["Evaluate", "interpret", "normalise"]
