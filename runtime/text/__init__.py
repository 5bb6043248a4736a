"""Between text and token ids: prompts, chat template, tokenizer, and ids back to text."""
