"""Programs whose warps have different work: which program is one, and what each of its warps does.

One warp loads what products read into rings of buffers, the others compute; neither waits for the other as long as a
ring has room. What a program means is what its statements mean in their order: none of this changes a value.
"""
