"""The tile-graph: every edge between two ops has a memory level (Welder, OSDI'23). Changes nothing, decides nothing.

In: a cover with its schedules. Out: edges with their levels (`edge`, `connect`), the part of each input that a tile of
a result needs (`propagate`), the bytes that tiles take at each level (`footprint`), and those that move (`traffic`).
It is a reading of what partition and schedule decided: a value inside a kernel is on chip, one between steps is not.
"""
