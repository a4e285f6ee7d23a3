"""Graph to Cover: which ops share a kernel, and which stay library calls or views.

`greedy` merges groups of ops while the modelled time does not grow; `candidates` and `choose_kernels` look for kernels
around contractions; `cover` puts both together. Prices come from outside: nothing here knows a schedule.
"""
