"""Front ends: from torch and ONNX programs to the graph. The only room that knows either.

`fx` imports a captured torch graph, `aten` declares its ops, `onnx` reads files; `loops` keeps loops as loops,
`autograd` cuts a program into its forward and backward pass, `aliasing` says whose memory results share, `placement`
on which device each part computes.
"""
