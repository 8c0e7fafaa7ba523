"""OpenAI's Responses API: its requests as chats, its answers and events, and the responses that are kept."""
