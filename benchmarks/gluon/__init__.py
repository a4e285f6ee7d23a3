"""Loops of the machine: a product and an attention written by hand in Gluon, beside the text that Triton compiles."""
