"""The CPU back end: compiled regions that a team of threads runs over the kept channels."""
