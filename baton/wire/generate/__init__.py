"""Generates the .proto file and the mapping between our values and protobuf from the messages' own types.

`python -m baton.wire.generate FOLDER` writes `baton.proto` and `mapping.py`; `make proto` calls it. The
messages are the structs that `baton.wire.services` reaches, so a field is declared once, in its struct.
"""
