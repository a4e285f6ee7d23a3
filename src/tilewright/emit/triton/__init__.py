"""TileProgram to Triton: one kernel per tile program, as the text of a Python file that imports Triton alone."""
