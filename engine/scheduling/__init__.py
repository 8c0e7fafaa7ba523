"""The scheduler and its parts: block accounts, prefix cache, sequences, order, speculation.

The package is pure: events and the time go in, plans come out. Simulators run the same objects.
"""
