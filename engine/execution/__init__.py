"""Steps as they run on the device: batches, CUDA graphs, draft models, self-timing."""
