"""Form and Schedule to TileProgram: one algorithm for every kernel. Decides nothing.

`plan` says which loops there are and what each advances, as data that print; `lower` writes them, and nothing else
does; `evaluate` writes what an expression needs in a frozen scope; `states` and `rescale` declare, advance and merge
reductions; `legality` says which roles a loop class may have. `legalise` then selects instructions for a machine.
"""
