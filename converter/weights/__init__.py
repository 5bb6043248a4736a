"""Weights changed before anything is measured: rotated, rounded, or fitted to what a layer is given (GPTQ)."""
