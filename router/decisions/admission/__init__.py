"""Admission: which requests wait for a place, in which order, and which are refused. Pure.

`router.decisions.waiting` applies it to sequences.

| module | decides |
|---|---|
| `queue` | the order of those that wait, and who makes room when the queue is full |
| `fair_shares` | whose turn it is among tenants |
| `tenant_usage` | who has more than its share at the workers already, and leaves room to others |
| `drain_rate` | how long the queue takes |
| `attainment` | whether a sequence can still meet its objectives |
| `retry_reservations` | when a refused client should come back, and that this is kept |
"""
