"""Loops of a graph, seen by partition: as calls whose bodies are graphs of their own.

`call` makes the call, `rows` finds bodies that make each row of that row alone, `steps` puts several steps into one
body.
"""
