"""The model to convert as transformers runs it: its source, its blocks in a chain, its masks."""
