"""The asyncio side of the router: driver of the pure core, sessions with workers, other routers, reports."""
