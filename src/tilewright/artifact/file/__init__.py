"""The file itself: its sections, its seal, and JSON in one form. Every byte is checked before anything is read."""
