"""What a finished search is worth: measured, put in words, drawn."""
