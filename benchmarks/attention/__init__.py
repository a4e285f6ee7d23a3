"""Attention variants nobody wrote a kernel for: seven cores, a layer stack around each, and their peers."""
