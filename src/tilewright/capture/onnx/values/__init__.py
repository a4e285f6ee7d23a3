"""Values of an ONNX model: while its graph is read (`traced`), while it runs (`run`), and small integers kept on the
host (`host`, `ratio`).
"""
