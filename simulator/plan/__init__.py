"""`baton plan` finds the cheapest cluster that serves a trace within its objectives.

It follows DistServe (Zhong et al., OSDI 2024, algorithm 1): first the highest rate of one worker of each
shape and phase, alone; then as many of the cheapest shapes as the trace needs; then the whole cluster in the
fleet simulator, which corrects what phases alone cannot show. Everything but the command is pure.
"""
