"""From a plan to results: machine, build, store, launch, and the callables that users hold.

`call` is what users hold, `plan` runs a plan's steps, `cpu` and `cuda` build and launch kernels, `loops` runs loops,
`own` is code of ours that is no generated kernel, `store` is what is kept on disk. Results never depend on the store.
"""
