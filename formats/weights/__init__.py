"""A model's weights in its safetensors files: the tensors as they stand, and the quantised packings people publish."""
