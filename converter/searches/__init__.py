"""From calibration tokens to one sparsity, scale and threshold per projection."""
