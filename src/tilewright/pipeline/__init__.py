"""From a captured graph to code that runs: the phases, in order, each with its name, time and result.

`compiler` is the list of phases, `build` makes code of a cover's kernels, `prices` says what kernels and calls cost on
this machine, `trial` times covers against each other, `loops` compiles the bodies of loops.
"""
