"""Form and Schedule to TileProgram: one algorithm for every kernel. Decides nothing.

`plan` says which loops there are and what each advances; `lower` writes them; `evaluate` writes what an expression
needs where some axes are bound; `states` declares, advances and merges reductions; `legality` says which roles a loop
class may have.
"""
