"""guidellm against Baton: eight chat requests, streamed, two at a time, of synthetic text."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

url, model, tokenizer = (os.environ[name] for name in ("BATON_URL", "MODEL", "TOKENIZER"))
with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "guidellm", "run"]
    command += ["--backend", f"kind=openai_http,target={url},model={model}"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=8"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=100,output_tokens=16"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
    out = Path(folder) / "found.json"
    command += ["--output", f"kind=json,path={out}", "--disable-console"]
    subprocess.run(command, check=True)
    found = json.loads(out.read_text())
totals = found["benchmarks"][0]["metrics"]["request_totals"]
assert (totals["successful"], totals["errored"]) == (8, 0), totals
print(totals)
