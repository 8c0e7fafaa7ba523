"""OpenAI's files and batches: what is kept of them, and what runs next."""
