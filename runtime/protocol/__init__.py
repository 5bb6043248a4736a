"""OpenAI's protocol as plain data: requests checked and read, answers written, whole or as events. No HTTP."""
