"""What every search works on: the model under masks, its tokens, and what is known of each block."""
