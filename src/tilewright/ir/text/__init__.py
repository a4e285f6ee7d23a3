"""Forms as text and back: `values` says how each value is written, `graph` writes a graph, `schedule` reads a schedule.

In: a frozen value. Out: for another process, JSON that names everything, and beside it a table of what exists only in
this one; of a schedule, the text that it prints itself.
"""
