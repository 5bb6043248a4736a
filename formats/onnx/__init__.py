"""A bundle as an ONNX folder: the graph, and the files around it."""
