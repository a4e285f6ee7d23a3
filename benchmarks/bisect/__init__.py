"""Planted defects, and whether `check --bisect` names them."""
