"""Forms as text and back, for another process: `values` says how each value is written, `graph` writes a graph.

In: a frozen value. Out: JSON that names everything; what exists only in this process goes beside it, in a table.
"""
