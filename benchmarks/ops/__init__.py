"""Torch's own samples of its operators, compiled and judged."""
