"""Kernel to Form, and Form to Form: one kernel as reductions and outputs over loop classes.

`compose` puts pointwise ops into their readers, `classes` joins axes that are one loop. The other files each keep the
meaning and change how it is computed: exponentials as powers of two, rows in parts, short sums without a loop; `sides`
makes one class of several on a side of a product.
"""
