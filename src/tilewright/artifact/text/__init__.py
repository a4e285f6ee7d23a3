"""What a file holds, as text and back: the captured graph, plans, calls, tensors, reports. Every value is checked."""
