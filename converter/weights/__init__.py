"""Weights in fewer bits: rounded, or fitted to what a layer is given (GPTQ), block by block."""
