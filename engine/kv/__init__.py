"""The KV pool of a worker, and the ways of its blocks: to peers, to host memory, to the store."""
