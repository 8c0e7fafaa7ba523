"""Messages on the wire: the .proto file, the code that is generated with it, and both sides of every call.

Protobuf objects never leave this package.
"""
