"""aiperf against Baton: eight chat requests, streamed, two at a time, tokens counted by the server."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "aiperf", "profile", "--model", os.environ["MODEL"]]
    command += ["--tokenizer", os.environ["TOKENIZER"], "--url", os.environ["BATON_URL"]]
    command += ["--endpoint-type", "chat", "--streaming", "--concurrency", "2", "--request-count", "8"]
    command += ["--synthetic-input-tokens-mean", "100", "--output-tokens-mean", "16"]
    command += ["--extra-inputs", "ignore_eos:true", "--use-server-token-count"]
    command += ["--ui", "none", "--no-gpu-telemetry", "--artifact-dir", folder]
    # When told that it is offline, aiperf looks for a hub's name in its cache and takes no folder.
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    subprocess.run(command, check=True, env=env)
    found = json.loads(next(Path(folder).rglob("profile_export_aiperf.json")).read_text())
assert found["request_count"]["avg"] == 8, found
assert not found["error_summary"], found["error_summary"]
assert found["output_sequence_length"]["min"] == found["output_sequence_length"]["max"] == 16
print("8 requests,", found["output_sequence_length"]["avg"], "tokens each, no error")
