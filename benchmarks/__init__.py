"""Figures beside the peers: models, memory-bound kernels, call overhead, compile time (`python -m
benchmarks.X`).
"""
