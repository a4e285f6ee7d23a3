"""What a program reads besides its arguments, and whether all of that is still as it was.

In: a program, and what torch has guarded where it was traced. Out: a look that costs next to nothing in each call.
"""
