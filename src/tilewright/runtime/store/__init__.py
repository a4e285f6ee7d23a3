"""What is kept on disk: built code, decisions about graphs. Safe for many processes, never the cause of a failure."""
