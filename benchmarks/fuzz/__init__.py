"""Random programs against the compiler: grown, judged, shrunk. See `__main__`."""
