"""Schedules that are proposed beside the usual one, for a clock to decide.

`plain_products` makes those of plain products, convolutions among them, ranked by `matmul_cost`; `product_loops` those
of loops with other products; `row_sums` those of long rows that nothing multiplies in blocks. Those of depthwise
convolutions are in `windows`.
"""
