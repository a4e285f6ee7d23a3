"""Whose memory is whose: how captured tensors lie, what of that calls rely on, whose memory a program returns."""
