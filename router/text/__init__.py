"""Text to tokens and back: tokenizer, chat templates, incremental detokenisation, message parsers.

Pure, but for the files that a tokenizer is read from.
"""
