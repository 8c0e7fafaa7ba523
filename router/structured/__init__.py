"""Which JSON schemas and grammars can be enforced. Pure."""
