"""From a captured graph to code that runs: the phases, in order, each with its name, time and result.

`phases` is the tuple of phases, `state` what each is given and gives, `compiler` runs them, `build` makes code of a
cover's kernels, `prices` says what kernels and calls cost on this machine, `trial` times covers against each other,
`loops` compiles the bodies of loops.
"""
