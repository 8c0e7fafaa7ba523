"""Where the experts of a Mixture-of-experts model are, and how they come there. Pure: counts, ranks and the
time go in, maps and actions come out.

`loads` turns counts of tokens into decayed counts. `place` decides which ranks hold which experts: `replicas`
says how many replicas each expert has, `groups` which nodes hold a group of experts, `packing` which ranks
hold each replica. `migrations` puts the difference of two maps in an order. `rollout` carries it out: ranks
load experts beside their work, and an epoch of the map begins when they have announced them. `group` joins
all of it with the processes of one group of ranks and with the callers that use its map.

Prefill and decode pools have maps of their own: each has its counts, its ranks and its rollout.
"""
