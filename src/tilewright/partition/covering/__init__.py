"""Kernels of a region in, the cheapest sets of them that make its results out.

`rounds` says which kernels are worth their price, `cheapest_sets` finds the sets.
"""
