"""Anthropic's Messages API: its requests as chats, its answers and events."""
