"""Local tasks for lm-evaluation-harness that ship with the project: YAML, and the code that makes their questions."""
