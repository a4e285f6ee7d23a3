"""What programs of unknown origin may do. In: graphs that were traced of them, or their ops as they run. Out: what may
read or write memory that is not theirs, by name."""
