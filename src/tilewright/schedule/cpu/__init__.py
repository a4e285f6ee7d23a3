"""Schedules and modelled times for machines with vectors: tiles that registers and the nearest caches hold."""
