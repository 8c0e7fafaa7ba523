"""How many replicas of each role there should be, and why. Pure: observations and the time go in, decisions
come out.

`demand` turns what was observed into rates, `forecast` says what they will be and how far off it has been,
`sizing` how many replicas that takes by the cost models workers report, `decide` what to do about the
difference, and `record` keeps every decision with its reason.
"""
