"""Reductions in parts that run side by side: one reduction becomes one over parts and one that merges.

    sum over r of x(i, r) = sum over p of (sum over r in part p of x(i, r))

Which: one reduction (`reduction`), a mean and its squares (`moments`, of columns in `row_chunks`), several that wait
for each other (`cascades`, `cascade_parts`), in as many parts as one policy finds fastest (`policy`); and the sum of a
product, where somebody asks for it (`products`). How: `parts`. The merge comes from the state of the reduction
(`merge_laws`).
"""
