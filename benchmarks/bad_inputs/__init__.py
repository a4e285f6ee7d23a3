"""What people get wrong, and what they are told: one line, a hint, the right exit code."""
