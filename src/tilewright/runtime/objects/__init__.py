"""What native code sees of Python's objects and of torch's: where tensors lie, and whether they are what they were."""
