"""The autoscaler decides how many replicas of each role there should be, and gives its reasons. Pure:
observations and the time go in, decisions come out.

`demand` turns observations into rates. `forecast` predicts them and keeps its own errors. `sizing` computes
how many replicas a load needs from the cost models that workers report. `decide` says what to do about the
difference, and `record` keeps every decision with its reason.
"""
