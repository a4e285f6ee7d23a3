"""What is kept of models for other processes: a compiled model as an artifact, a captured graph in the store.

`saving` finds the graphs behind a compiled model, which `export` makes of a module or a function; `captures` keeps what
was captured of a model file, by the bytes of the file.
"""
