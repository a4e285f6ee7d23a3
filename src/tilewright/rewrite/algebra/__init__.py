"""Algebraic rules over the border of a reduction, and the search that applies them.

    sum over j of a(i) * b(i, j) = a(i) * (sum over j of b(i, j))

`laws` holds the rules as data: what they find, the law, its condition. `search` tries which of them, applied where,
leave the fewest bytes of intermediates.
"""
