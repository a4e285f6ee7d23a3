"""Which schedule is the fastest? The only room that asks.

In: a form, a machine, sizes. Out: a schedule and its modelled time. `solver` solves each distinct kernel once; it asks
a `scheduler`: one in `cpu` for machines with vectors, one in `gpu` for those whose threads share a grid point. `table`
holds measured block sizes.
"""
