"""Compiled models as files: saved once, loaded where neither a compiler nor a capture is needed.

In: a compiled model. Out: one file of sections (`container`): the captured graph as text, the plan as text, tensors,
machine code, and a seal (`trust`). Back: a model that runs the plan as it is, or one that is built again from the graph
where machine code is not to be trusted or not for this machine (`rebuild`). Nothing in a file is run or looked up by
name unless a closed list has it (`routines`, `calls`).
"""
