"""Sizes: whole numbers that may be known only at run time.

`dims` is arithmetic over axes and symbols in a normal form, `linear_form` compares and divides sizes, `cases` proves
two equal range by range, `host` finds the number that an expression has once the symbols are known, `rounding` rounds
whole numbers to powers of two.
A size that is not known stays a symbol: nothing here asks torch a question that could install a guard.
"""
