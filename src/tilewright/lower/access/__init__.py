"""How programs access memory: by descriptors, and once for several steps of a loop."""
