"""Calls of libraries instead of kernels: which there are, which form is fastest, what they can do on their result.

In: a graph with captured contractions and convolutions. Out: the same graph, each of them as a library call in its
fastest form, or as ops for a kernel. `recognise` finds regions that compute what a fused routine computes.
"""
