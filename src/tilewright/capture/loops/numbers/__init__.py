"""Numbers among the arguments of ops that change with the step of a loop.

In: a node of a step. Out: which of its arguments may be another number in each step (`places`), and what computes the
same of a tensor without dims in the place of each (`stepping`; `twins` and `activations` for ops that take no tensor
there).
"""
