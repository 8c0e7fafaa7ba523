"""How KV bytes move between the pools of two workers: one interface, several backends."""
