"""Loops whose body is a plan of its own: run step by step, natively, by rows, or as one CUDA graph."""
