"""What an element can be: its sign, its bounds, under which conditions it is which constant.

In: expressions and what is known of their reads. Out: intervals, cases and constant regions, which hold for every
input. Rewrites ask here whether a law's condition holds.
"""
