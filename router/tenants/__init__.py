"""Who may ask, and for how much: API keys, their tenants, and the tenants' budgets.

`keys` and `key_files` are the pure part; `keyring` keeps a file or a Redis in view; `budgets` and its
backends count what is taken; `gate` puts them in front of the public API.
"""
