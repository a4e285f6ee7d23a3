"""Masks made of data: what they hide is found once, by a kernel, before the kernels that would compute it.

`find` tells where ops put a constant in place of what data hides; `block_lists` makes, for each block of rows, the list
of tiles that a mask leaves something of.
"""
