"""Small programs trained one step, compiled and judged: results, gradients and buffers."""
