"""CPUs: what the machine is, how code for it is built and loaded, the thread pool, calls that are one native
function.
"""
