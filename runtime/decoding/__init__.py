"""What every decoder has: its cache, the positions in it, the memory it needs, and how the next token is drawn."""
