"""The online law: which reductions may run in one pass though one reads the other.

In: the body of a reduction that reads results of reductions before it. Out: the running statistic by which partial
sums are corrected while those still move, or why there is none. A softmax is one case among others.
"""
