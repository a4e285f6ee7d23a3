"""One spelling for what a captured graph says in several, in front of the search for equal steps.

In: a graph as Dynamo captures it. Out: one that computes and writes the same. `bodies` has one function for all that
do the same, `parts` one way to write into a part of a tensor. Where no steps are found alike, `fresh` computes apart
what is written into new tensors, and `rows` writes each row of a table once.
"""
