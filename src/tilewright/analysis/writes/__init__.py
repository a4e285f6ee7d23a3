"""Writes into inputs: which of them kernels and calls may do where the input lies.

In: a cover, whose graph ends in `Write`s; tile programs. Out: `law.decide` says of each write whether it is done in
place, or why not; `order` holds a tile program that loads what it stores over against the law once more."""
