"""Documents, and the calibration tokens that are drawn from them or written by the model itself."""
