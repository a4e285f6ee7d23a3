"""TileProgram to TileProgram: selects instructions for one kind of machine, so that printers decide nothing.

In: the program of a kernel and facts of its target. Out: the same program with fields of `ir/selection` filled in: its
meaning is what it was. `gpu` is for machines whose threads share a grid point, `cpu` for vectors of elements.
"""
