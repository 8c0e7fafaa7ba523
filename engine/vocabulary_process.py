"""Reads a model's tokenizer for xgrammar, in a process that ends with it.

transformers imports a thousand modules of torch, triton among them, before it reads a tokenizer where it
finds torch: seconds of the engine's interpreter, and 200 MB that a worker would keep and never use. Here is
no torch, and the worker gets the vocabulary alone.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.wire.parent import end_with_parent
from engine.model_files.quick_transformers import import_transformers
from engine.stand_ins import leave_out

READ_S = 120.0
"""Longest time for reading a tokenizer. Largest ones take five seconds of an idle core."""


class VocabularyUnread(Exception):
    """The process did not answer. The tokenizer may be fine nevertheless."""


class TokenizerUnusable(Exception):
    """The libraries do not make a vocabulary of this tokenizer."""


def read_vocabulary(folder: Path, vocab: int, stop_token_ids: Sequence[int]) -> str:
    """Return xgrammar's TokenizerInfo of the folder's tokenizer, as its `deserialize_json` reads it. Raises
    VocabularyUnread and TokenizerUnusable."""
    stops = ",".join(str(token) for token in stop_token_ids)
    command = [sys.executable, "-m", "engine.vocabulary_process", str(os.getpid())]
    try:
        done = subprocess.run(
            [*command, str(folder), str(vocab), stops],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=READ_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise VocabularyUnread(str(error)) from error
    if done.returncode < 0:
        raise VocabularyUnread(f"it was ended by signal {-done.returncode}")
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise TokenizerUnusable(lines[-1] if lines else f"it ended with status {done.returncode}")
    return done.stdout.decode()


def main(folder: Path, vocab: int, stop_token_ids: Sequence[int]) -> None:
    # What libraries print must not come between the answer.
    answer = os.dup(1)
    os.dup2(2, 1)
    modules: dict[str, Any] = sys.modules
    modules["torch"] = None  # None makes Python act as if the module did not exist
    import_transformers()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    del modules["torch"]
    leave_out("torch")  # xgrammar imports it for kernels that nobody calls here
    from xgrammar import TokenizerInfo

    stops = list(stop_token_ids) or None
    info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab, stop_token_ids=stops)
    text = info.serialize_json()
    with os.fdopen(answer, "w") as file:
        file.write(text)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]), signal.SIGKILL)
    main(Path(sys.argv[2]), int(sys.argv[3]), [int(token) for token in sys.argv[4].split(",") if token])
