"""The asyncio side of the router: the driver of the pure core, sessions with workers and other routers,
reports."""
