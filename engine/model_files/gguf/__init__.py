"""GGUF files (llama.cpp's format) as models: read, and presented as a Hugging Face folder."""
