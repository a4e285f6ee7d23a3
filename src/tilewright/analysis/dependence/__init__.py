"""Which axes of which values are one loop, and whether that loop may be cut into parallel parts.

In: access maps of ops. Out: for each dim of a read how it follows the axes of its op, and per value the properties
that FlashTensor (PPoPP'25) defines: reduce dependency, broadcast, size.
"""
