"""Reductions in parts that run side by side: one reduction becomes one over parts and one that merges.

    sum over r of x(i, r) = sum over p of (sum over r in part p of x(i, r))

For one reduction (`reduction`), for a mean and its squares (`moments`), for several that wait for each other
(`cascades`, `cascade_parts`). The merge comes from the state of the reduction. All are cut alike (`cut`), in as many
parts as one policy finds fastest (`policy`).
"""
