"""Products of a few rows with weights of any kind, over the channels that they keep."""
