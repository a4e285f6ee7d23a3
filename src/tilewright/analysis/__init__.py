"""Facts about expressions, graphs and forms. Decides nothing, changes nothing.

In: a value of `ir`. Out: what holds for it, proved: signs and intervals (`value`), which dims of which values are one
loop (`dependence`), which reductions may run beside each other (`online`), where a condition holds (`predicate`,
`condition_ranges`, `data_masks`), which reductions are products of matrices (`contraction`). What cannot be proved is
not claimed.
"""
