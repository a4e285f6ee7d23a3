"""Front ends: from torch and ONNX programs to the graph."""
