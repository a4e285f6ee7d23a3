"""Model classes that nobody chose, taken by script from the packages' own lists. See `__main__`."""
