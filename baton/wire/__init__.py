"""Messages on the wire: .proto files, their generated stubs, and the codec to `baton.core.messages`.

Generated stubs never leave this package.
"""
