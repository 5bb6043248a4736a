"""The decoder in plain PyTorch."""
