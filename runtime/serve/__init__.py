"""Serving over HTTP: OpenAI's protocol on one engine."""
