"""From requests to answers, token by token: one engine, its running batch, and what a request may ask of it."""
