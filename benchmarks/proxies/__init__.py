"""Small front ends for servers that have none of their own: what a peer is measured behind."""
