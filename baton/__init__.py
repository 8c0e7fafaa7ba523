"""Baton: an LLM serving cluster that runs prefill and decode on separate pools of workers."""
