"""Loops stay loops: torch's own, those of recurrent layers, and Python loops that Dynamo took apart.

In: a captured graph with equal steps, or with a scan. Out: a graph with one loop op whose body is a graph. `repeats`
finds equal steps, `unrolled` says what they read and make (`numbers`: numbers that change), `rolled` and `scanned` put
a scan in their place.
"""
