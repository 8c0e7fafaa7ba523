"""Files that people name: outputs, structured input, tokens, and the terminal."""
