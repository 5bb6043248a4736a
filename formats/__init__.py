"""What is on disk: the bundle and its recipe, written, read and verified."""
