"""Routed experts on processes of their own, and how workers reach them.

`rank` is an expert rank: it holds experts (`bank`) and computes the rows that callers send. `caller` is the
side of a worker: it divides a layer's rows over ranks and collects the results, by the routes of
`engine.scheduling.expert_routes`. Rows travel through memory that both map (`exchange`, `doors`), or over TCP
between hosts (`far_links`).
"""
