"""What a replay of a CUDA graph does besides: inputs are looked at and copied in, results handed out."""
