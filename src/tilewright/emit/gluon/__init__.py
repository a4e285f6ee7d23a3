"""Text in Gluon, the dialect of Triton in which warps, layouts of registers and buffers are explicit."""
