"""From a bundle to tokens: decoder, cache, sampling, generation. Never imports the converter nor transformers."""
