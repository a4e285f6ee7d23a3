"""Finding the machine, building, caching, binding and launching."""
