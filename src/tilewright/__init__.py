"""Tilewright: a deep-learning compiler that treats a model as one problem of moving bytes."""

__version__ = "0.1.0"
