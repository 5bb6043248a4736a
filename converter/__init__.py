"""From a Hugging Face model to a recipe: calibration, statistics, searches. Never imports the runtime."""
