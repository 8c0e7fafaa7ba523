"""lm-eval against Baton: three tasks made of Python's own documentation, by completions and by chat.

With WEIGHTS, the folder of the served model, scores and answers are compared with those of transformers in
float32. Serve that folder with `--set model.dtype=float32` for it.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

COUNT = 3
NAMES = sorted(name for name, text in topics.items() if len(text) > 1500)[: COUNT + 2]
TEXTS = [" ".join(topics[name].split())[:600] for name in NAMES]
METRICS = {
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "multiple_choice": ("acc", "acc_norm"),
    "generate_until": ("chrf",),
}


def make_tasks(folder: Path) -> None:
    """Write a task for each of lm-eval's output types, and the texts that all of them read."""
    docs = [
        {
            "text": TEXTS[i],
            "start": TEXTS[i][:300],
            "ends": [TEXTS[i + k][300:360] for k in range(3)],
            "right": 0,
        }
        for i in range(COUNT)
    ]
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    fields = {
        "loglikelihood_rolling": {"doc_to_text": "", "doc_to_target": "{{text}}"},
        "multiple_choice": {"doc_to_text": "{{start}}", "doc_to_choice": "ends", "doc_to_target": "right"},
        "generate_until": {
            "doc_to_text": "Go on: {{start}}",
            "doc_to_target": "{{ends[0]}}",
            "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False},
        },
    }
    for kind, of_kind in fields.items():
        task = {
            "task": f"topics_{kind}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "docs.jsonl")}},
            "test_split": "test",
            "output_type": kind,
            "metric_list": [{"metric": metric} for metric in METRICS[kind]],
        }
        (folder / f"{kind}.yaml").write_text(json.dumps(task | of_kind))  # JSON is YAML


def evaluated(tasks: Path, kinds: list[str], model: str, options: dict[str, str], *more: str) -> dict:
    """Run lm-eval. Returns the scores as its table prints them, and the generated texts."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--include_path", str(tasks)]
        command += ["--model_args", ",".join(f"{name}={value}" for name, value in options.items())]
        command += ["--tasks", ",".join(f"topics_{kind}" for kind in kinds), "--batch_size", "1"]
        command += ["--output_path", out, "--log_samples", *more]
        subprocess.run(command, check=True)
        results = json.loads(next(Path(out).rglob("results_*.json")).read_text())["results"]
        found = {m: f"{results[f'topics_{kind}'][f'{m},none']:.4f}" for kind in kinds for m in METRICS[kind]}
        for samples in Path(out).rglob("samples_topics_generate_until_*.jsonl"):
            answers = [json.loads(line) for line in samples.read_text().splitlines()]
            found |= {f"answer {one['doc_id']}": one["filtered_resps"][0] for one in answers}
    return found


def main() -> None:
    url, weights = os.environ["BATON_URL"], os.environ.get("WEIGHTS")
    scored, written = ["loglikelihood_rolling", "multiple_choice"], ["generate_until"]
    served = {"model": os.environ["MODEL"], "base_url": f"{url}/v1/completions"}
    chat = served | {"base_url": f"{url}/v1/chat/completions"}
    local = {"tokenizer_backend": "huggingface", "tokenizer": os.environ["TOKENIZER"]}
    with tempfile.TemporaryDirectory() as folder:
        tasks = Path(folder)
        make_tasks(tasks)
        found = evaluated(tasks, scored, "local-completions", served | local)
        print("local-completions", found)
        remote = evaluated(tasks, scored, "local-completions", served | {"tokenizer_backend": "remote"})
        assert remote == found, remote
        print("tokenizer_backend=remote: the same")
        answers = evaluated(tasks, written, "local-chat-completions", chat, "--apply_chat_template")
        print("local-chat-completions", answers)
        if weights:
            own = {"pretrained": weights, "dtype": "float32"}
            reference = evaluated(tasks, scored, "hf", own, "--device", "cpu")
            print("transformers in float32", reference)
            # A word's perplexity is printed with seven digits; the last two have been seen to differ.
            words = [float(scores.pop("word_perplexity")) for scores in (found, reference)]
            assert found == reference
            assert math.isclose(*words, rel_tol=1e-4), words
            assert evaluated(tasks, written, "hf", own, "--device", "cpu", "--apply_chat_template") == answers
            print("transformers in float32: the same scores and answers")


if __name__ == "__main__":
    main()
