"""Which schedule is the fastest? The only room that asks.

In: a form, a machine, sizes. Out: a schedule and its modelled time. `solver` solves each distinct kernel once; `cpu`
is for machines with vectors, `gpu` for machines whose threads share a grid point; `table` holds measured block sizes.
"""
