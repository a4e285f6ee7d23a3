"""Forward and backward: torch's ahead-of-time autograd around our compiler, what is saved, what is drawn again."""
