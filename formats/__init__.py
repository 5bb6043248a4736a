"""What is on disk: the bundle and its recipe, written, read and verified.

This room imports nothing of ours, so that everything else can rest on it.
"""
