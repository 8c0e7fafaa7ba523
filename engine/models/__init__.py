"""What a model is (`spec`, without torch) and how it is computed."""
