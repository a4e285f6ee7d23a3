"""What is kept on disk: built code, decisions about graphs, and what clocks decided as files that people take along.
Safe for many processes, never the cause of a failure; but a tuning file that says what none can say is refused."""
