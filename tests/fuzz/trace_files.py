"""Traces in all formats, and stored reports and records."""

import tempfile
from pathlib import Path

from tests.fuzz.harness import Fuzzer, check_message, main

PACKAGES = ("loadgen",)
WORDS = (
    *(
        b'{"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": [1]}\n',
        b"\n",
        b",",
        b'"',
        b"NaN",
    ),
    *(
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n",
        b"2024-05-10 00:00:00.009930",
        b"\x1f\x8b",
        b"-1",
        b"1e999",
    ),
    *(
        b'"chat_id": 1',
        b'"parent_chat_id": -1',
        b'"turn": 1',
        b'"type": "text"',
        b"9" * 30,
        b'"hash_ids": {}',
    ),
    *(b'"schema":"baton-records/1"', b'"settings":{}', b"9999-12-31 23:59:59", b"\xef\xbb\xbf"),
)


def load() -> Fuzzer:
    from baton.core.errors import SetupError
    from loadgen.files import read_run
    from loadgen.traces import read_trace

    folder = Path(tempfile.mkdtemp(prefix="baton-fuzz-"))

    def check(content: bytes) -> None:
        """The first byte says what reads the rest."""
        name = {b"r": "run.json", b"z": "run.json.gz"}.get(content[:1], "trace")
        path = folder / name
        path.write_bytes(content[1:])
        try:
            if name == "trace":
                trace = read_trace(path)
                assert all(0 <= r.at_s < float("inf") for r in trace.requests)
            else:
                read_run(path)
        except SetupError as error:
            check_message(error)

    return Fuzzer("trace_files", check, WORDS)


if __name__ == "__main__":
    main(load, PACKAGES)
