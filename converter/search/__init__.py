"""Searches: thresholds, exponents and sparsities of every projection."""
