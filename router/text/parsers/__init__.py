"""Parsers from generated text to messages: reasoning, content, tool calls. Incremental and pure.

A parser gets text in pieces and answers with deltas. Its whole output does not depend on how the text was cut
into pieces. No text makes it fail: text that is not a well-formed call is content.
"""
