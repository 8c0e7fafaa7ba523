"""Safetensors files and their index. What is accepted here, the format's own library must accept too."""

import tempfile
from pathlib import Path

from tests.fuzz.harness import Fuzzer, check_message, main

PACKAGES = ("engine.model_files",)
WORDS = (
    *(b'"dtype":"F32"', b'"shape":[2,3]', b'"data_offsets":[0,24]', b'"__metadata__":{}', b'"weight_map":'),
    *(
        b"../",
        b"/etc/passwd",
        b"model.safetensors",
        b"null",
        b"NaN",
        b"1e999",
        b"-1",
        b"9" * 30,
        b"[[[[",
        b"{",
    ),
)
KNOWN = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"})


def load() -> Fuzzer:
    from safetensors import deserialize

    from baton.core.errors import SetupError
    from engine.model_files.safetensors_files import read_header, weight_files

    folder = Path(tempfile.mkdtemp(prefix="baton-fuzz-"))
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    (folder / "part.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")

    def check(content: bytes) -> None:
        """The first byte says what the rest is: a file, the header of one, or an index."""
        kind, rest = content[:1], content[1:]
        single.unlink(missing_ok=True)
        index.unlink(missing_ok=True)
        try:
            if kind == b"i":
                index.write_bytes(rest)
                assert all(file.parent == folder for file in weight_files(folder))
                return
            if kind == b"h":  # a header and four kilobytes of values
                rest = len(rest).to_bytes(8, "little") + rest + bytes(4096)
            single.write_bytes(rest)
            _, entries = read_header(single)
        except SetupError as error:
            check_message(error)
            return
        # The number -0 is the integer 0 to us and a floating point number to the format's own library.
        if b"-0" not in rest and all(entry.dtype in KNOWN for entry in entries.values()):
            theirs = dict(deserialize(rest))
            assert {name: tuple(theirs[name]["shape"]) for name in entries} == {
                name: entry.shape for name, entry in entries.items()
            }

    return Fuzzer("safetensors", check, WORDS)


if __name__ == "__main__":
    main(load, PACKAGES)
