"""Code of our own that is no generated kernel: packed products and attention, and the timer that chooses among ways
to do a call.
"""
