"""The demo: real models with real weights, every contestant beside the others (`python -m demo`)."""
