"""GGUF files: header, metadata, tensors' places, and the config.json that is made of them."""

import tempfile
from pathlib import Path

from tests.fuzz.harness import Fuzzer, check_message, main

PACKAGES = ("engine.model_files",)
WORDS = (
    *(b"GGUF", b"general.architecture", b"general.alignment", b"split.count", b"token_embd.weight"),
    *(b"llama.block_count", b"llama.attention.head_count", b"llama.rope.freq_base", b"rope_freqs.weight"),
    *(b"llama", b"gemma3", b"phi3", b"qwen3moe", b"output.weight", b"\x00" * 8, b"\xff" * 8),
)


def load() -> Fuzzer:
    from baton.core.errors import SetupError
    from engine.model_files.gguf.config import hugging_face_config
    from engine.model_files.gguf.reader import read_gguf
    from engine.model_files.read_spec import parse_spec

    path = Path(tempfile.mkdtemp(prefix="baton-fuzz-")) / "model.gguf"

    def check(content: bytes) -> None:
        path.write_bytes(content)
        try:
            header = read_gguf(path)
        except SetupError as error:
            check_message(error)
            return
        end = 0
        for tensor in sorted(header.tensors.values(), key=lambda one: (one.start, one.end)):
            assert end <= tensor.start <= tensor.end <= len(content), tensor
            end = tensor.end
        try:
            parse_spec(hugging_face_config(header))
        except SetupError as error:
            check_message(error)

    return Fuzzer("gguf", check, WORDS)


if __name__ == "__main__":
    main(load, PACKAGES)
