"""One file per sub-command: its options, one call, its output."""
