"""Quantised checkpoints as people publish them: what ``quantization_config`` says, and how each packing is read."""
