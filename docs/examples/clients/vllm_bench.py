"""`vllm bench serve` against Baton: eight random prompts, two at a time, by completions and by chat."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

url, model, tokenizer = (os.environ[name] for name in ("BATON_URL", "MODEL", "TOKENIZER"))
for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
        command += ["--backend", backend, "--base-url", url, "--endpoint", path]
        command += ["--model", model, "--tokenizer", tokenizer, "--dataset-name", "random"]
        command += ["--random-input-len", "100", "--random-output-len", "16", "--ignore-eos"]
        command += ["--num-prompts", "8", "--max-concurrency", "2", "--disable-tqdm"]
        command += ["--save-result", "--result-dir", folder, "--result-filename", "found.json"]
        subprocess.run(command, check=True)
        found = json.loads((Path(folder) / "found.json").read_text())
    assert (found["completed"], found["total_output_tokens"]) == (8, 8 * 16), found
    print(backend, found["completed"], "requests,", found["total_output_tokens"], "tokens")
