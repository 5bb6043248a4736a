"""The decoder for NVIDIA GPUs."""
