"""Running a plan: sizes and memory of a call are found, its steps run, its results handed out.

`executable` is the callable, `bound` a plan under exact sizes, `steps` its steps over one workspace, `verified` a net
that holds each step against its meaning.
"""
