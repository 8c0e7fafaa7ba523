"""The HTTP side of the router: connection, authentication, endpoints, and streams to clients."""
