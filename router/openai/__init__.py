"""OpenAI's API as values: requests are parsed and checked, answers become bytes. Pure."""
