"""How a target becomes a compiled model: `files` for model files and programs, `traced` for what Dynamo traces.

`traced` brings all of Dynamo (a second of imports), which files do without.
"""
