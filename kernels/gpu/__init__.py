"""The GPU back end: Triton kernels over the kept channels, and the tiles they get."""
