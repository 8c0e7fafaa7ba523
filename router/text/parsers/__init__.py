"""From generated text to messages: reasoning, content, tool calls. Incremental, pure.

A parser gets text in pieces and answers with deltas. What it says in all does not depend on how the text was
cut into pieces. No text makes it fail: what is no well-formed call is content.
"""
