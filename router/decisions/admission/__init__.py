"""Admission: which requests wait for a place, in which order, and which are refused. Pure.

`router.decisions.waiting` applies it to sequences.

| module | decides |
|---|---|
| `line` | the order of those that wait, and who makes room when the line is full |
| `shares` | whose turn it is among tenants |
| `holdings` | who has more than its share at the workers already, and leaves room to others |
| `pace` | how long the line takes |
| `attainment` | whether a sequence can still meet its objectives |
| `promises` | when a refused client should come back, and that this is kept |
"""
