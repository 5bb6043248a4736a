"""The decoder for CPUs."""
