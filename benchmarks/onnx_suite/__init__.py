"""ONNX's own backend suite through the compiler: which cases there are, how they are judged, who runs them."""
