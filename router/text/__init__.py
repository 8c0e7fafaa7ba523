"""Text to tokens and back: tokenizer, chat templates, incremental detokenisation, message parsers.

All of it is pure, except that a tokenizer is read from files.
"""
