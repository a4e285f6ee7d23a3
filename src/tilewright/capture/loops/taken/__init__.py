"""What each step of a loop takes another part of.

In: what the same node of each step reads. Out: parts of one tensor, at places that count or in any order (`parts`), and
the other `kinds`.
"""
