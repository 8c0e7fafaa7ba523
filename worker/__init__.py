"""One worker process: the pure core, and the asyncio adapters around it."""
