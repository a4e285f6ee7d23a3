"""Form and Schedule to TileProgram: one algorithm for every kernel. Decides nothing.

`lower` writes scopes, passes and loops; `evaluate` writes what an expression needs where some axes are bound; `states`
declares, advances and merges reductions; `legality` says which roles a loop class may have.
"""
