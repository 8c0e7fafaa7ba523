"""What steps cost whose experts are divided over the GPUs of many nodes, from data sheets.

`layout` says where experts are and how rows travel. `popularity` says how unevenly tokens use experts, and
how well the production placement evens it out. `traffic` counts the bytes of a token's rows, `stages` the
seconds of the parts of a layer, and `timeline` puts the parts of two halves of a batch one beside the other.
`pool` makes the costs of one pool's workers of all this. `loss` says what the loss of a node does to a pool.
"""
