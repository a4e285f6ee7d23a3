"""Where a captured graph computes: its device, what moves there, and stages that alternate between two sides."""
