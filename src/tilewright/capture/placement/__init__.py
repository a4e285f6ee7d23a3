"""Where a captured graph computes and how its inputs lie: its device, what moves there, and stages that alternate
between two sides."""
