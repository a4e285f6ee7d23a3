"""Writes of a part of an input.

In: a graph whose written values are inputs with some elements replaced. Out: the same with the lines alone, and calls
that put them there (`part`), which a plan does in the input's own memory where the law of `analysis/writes` allows."""
