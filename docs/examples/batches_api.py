"""OpenAI's files and batches by the `openai` package.

python docs/examples/batches_api.py http://127.0.0.1:8000 MODEL
"""

import json
import sys
import time

import openai

URL, MODEL = sys.argv[1].rstrip("/"), sys.argv[2]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
WAIT_S, LOOK_S = 300, 0.2


def line(number: int, **changes: object) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"Say {number}."}], "max_tokens": 8}
    return json.dumps(
        {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body | changes}
    )


def run(lines: list[str]) -> openai.types.Batch:
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    assert client.files.content(file.id).text == "\n".join(lines)
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    until_s = time.monotonic() + WAIT_S
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < until_s, batch
        time.sleep(LOOK_S)
        batch = client.batches.retrieve(batch.id)
    return batch


batch = run([line(0), line(1), line(2, temperature=99), line(3)])
assert batch.status == "completed", batch
assert (batch.request_counts.completed, batch.request_counts.failed) == (3, 1)
results = [json.loads(one) for one in client.files.content(batch.output_file_id).text.splitlines()]
assert sorted(one["custom_id"] for one in results) == ["r0", "r1", "r3"]
assert all(one["response"]["body"]["choices"][0]["message"]["content"] for one in results)
(failed,) = [json.loads(one) for one in client.files.content(batch.error_file_id).text.splitlines()]
assert failed["response"]["status_code"] == 400
assert failed["response"]["body"]["error"]["param"] == "temperature"

batch = run([line(0), line(0), "{"])
assert batch.status == "failed"
assert [(fault.line, fault.param) for fault in batch.errors.data] == [(2, "custom_id"), (3, None)]
assert batch.id in [one.id for one in client.batches.list(limit=5).data]
client.files.delete(batch.input_file_id)
print("batches: all as OpenAI's API has them")
