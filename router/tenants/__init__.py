"""API keys, their tenants, and the tenants' budgets.

`keys` is pure; `key_files` reads and writes files of keys, and `keyring` follows a file or a Redis. `budgets`
and its backends count what is taken. `router.http.authentication` applies both to the public API.
"""
