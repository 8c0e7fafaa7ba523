"""Metrics, traces and logs. Each metric is declared once, in `catalogue`."""
