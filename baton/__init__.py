"""Baton: an LLM serving cluster that runs prefill and decode on separate pools of workers."""

__version__ = "0.1.0"
