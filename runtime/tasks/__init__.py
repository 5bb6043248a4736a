"""Local tasks for lm-evaluation-harness that ship with the project: YAML, data, and the code that made the data."""
