"""What a clock says of a cover's kernels: `kernel_ways` under other schedules, `kernel_fronts` with what is in front of
them; `joined_cover` is which of them are joined."""
