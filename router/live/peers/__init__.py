"""Other routers of the same cluster: what they have in flight counts here, and ours counts there."""
