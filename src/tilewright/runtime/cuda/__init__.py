"""GPUs: the driver, building Triton sources in worker processes, launches, graphs. One file knows Triton's
interface.
"""
