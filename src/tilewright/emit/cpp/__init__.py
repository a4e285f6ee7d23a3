"""TileProgram to C++: one translation unit for all kernels of a plan, over the vector headers of `emit/native`."""
