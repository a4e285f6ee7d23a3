"""The declarations of the ops: one function of a Builder and values each, in files by family."""
