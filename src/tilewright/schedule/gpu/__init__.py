"""Schedules and modelled times for machines whose threads share a grid point.

`blocks` gives every class a block whose length is a power of two, `matmul` chooses tiles, warps and stages of kernels
with products, `skinny_matmul` those of few rows; `cost` is the model, `shared_memory` what a block needs of it.
`proposed` makes further schedules for a clock to decide, and `windows` those of depthwise convolutions; `capacity`
refuses what no level can hold.
"""
