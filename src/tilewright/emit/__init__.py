"""TileProgram to text: C++ for CPUs, Triton for GPUs. The printers decide nothing.

In: legalised tile programs. Out: a `Source` with entry points. `native` holds the headers that printed C++ includes.
"""
