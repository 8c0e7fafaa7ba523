"""How much of public JSON schema suites vLLM's structured output accepts, and whether its texts are valid.

    python -P benchmarks/structured_peers.py FOLDER --backend xgrammar|guidance [--every N] [--walks N]

The counterpart of `benchmarks.structured_suite`: the same files, the same bytes as vocabulary, the same
random walks, the same validation. It runs in an environment with vLLM and jsonschema, and without
this project. The schemas go through vLLM's own checks and the calls of its backends, with vLLM's defaults.
"""

import argparse
import importlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

END = 256
PATIENCE, BYTES_MAX = 80, 6000


def schemas_in(folder: Path, every: int) -> Any:
    """Name and schema, as `benchmarks.structured_suite` has them."""
    for path in sorted(folder.rglob("*.json"))[::every]:
        content = json.loads(path.read_text())
        if isinstance(content, list):
            for number, case in enumerate(content):
                yield f"{path.name}[{number}]", case["schema"]
        else:
            yield path.name, content


class XgrammarPeer:
    """xgrammar as vLLM's backend of this name calls it."""

    def __init__(self) -> None:
        self._x = importlib.import_module("xgrammar")
        self._torch = importlib.import_module("torch")
        self._checks = importlib.import_module("vllm.v1.structured_output.backend_xgrammar")
        words = [bytes([byte]) for byte in range(256)] + [b"<end>"]
        info = self._x.TokenizerInfo(words, vocab_size=len(words), stop_token_ids=[END])
        self._compiler = self._x.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: Any) -> Any:
        """Raises whatever vLLM raises."""
        if isinstance(schema, dict) and self._checks.has_xgrammar_unsupported_json_features(schema):
            raise ValueError("vLLM: features that xgrammar lacks")
        compiled = self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=True)
        matcher = self._x.GrammarMatcher(compiled)
        mask = self._torch.zeros(1, 9, dtype=self._torch.int32)

        def allowed() -> list[int]:
            matcher.fill_next_token_bitmask(mask)
            return _bits(mask[0])

        return lambda: matcher.reset() or (allowed, matcher.accept_token)


class GuidancePeer:
    """llguidance as vLLM's backend `guidance` calls it."""

    def __init__(self) -> None:
        self._guidance = importlib.import_module("llguidance")
        self._masks = importlib.import_module("llguidance.torch")
        self._checks = importlib.import_module("vllm.v1.structured_output.backend_guidance")
        self._tokens = self._guidance.LLTokenizer("byte")

    def compile(self, schema: Any) -> Any:
        """Raises whatever vLLM raises."""
        if isinstance(schema, dict) and self._checks.has_guidance_unsupported_json_features(schema):
            raise ValueError("vLLM: features that llguidance lacks")
        matcher_of = self._guidance.LLMatcher
        text = matcher_of.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_flexible": True})
        if error := matcher_of.validate_grammar(text, self._tokens):
            raise ValueError(error)
        first = matcher_of(self._tokens, text, log_level=0)
        if first.get_error():
            raise ValueError(first.get_error())
        mask = self._masks.allocate_token_bitmask(1, self._tokens.vocab_size)

        def start() -> Any:
            matcher = matcher_of(self._tokens, text, log_level=0)

            def allowed() -> list[int]:
                self._masks.fill_next_token_bitmask(matcher, mask, 0)
                found = [token for token in _bits(mask[0]) if token < END]
                return [*found, END] if matcher.is_accepting() else found

            return allowed, matcher.consume_token

        return start


def _bits(mask: Any) -> list[int]:
    words = mask.numpy().view("uint32")
    return [token for token in range(257) if words[token // 32] >> (token % 32) & 1]


def text_of(start: Any, seed: int) -> str | None:
    """Return one text; None: it did not end."""
    rng, (allowed, accept), text = random.Random(seed), start(), bytearray()
    while len(text) < BYTES_MAX:
        tokens = allowed()
        dull = [token for token in tokens if token > 0x20 and token != 0xED] or tokens
        if not dull:
            return None
        token = _chosen(rng, dull, is_leaving=len(text) > PATIENCE)
        if token == END:
            return text.decode(errors="replace")
        if not accept(token):
            return None
        text.append(token)
    return None


def _chosen(rng: random.Random, allowed: list[int], *, is_leaving: bool) -> int:
    if END in allowed and (is_leaving or rng.random() < 0.3):
        return END
    if is_leaving and (closing := [token for token in allowed if token in b'"}]']):
        return rng.choice(closing)
    if is_leaving and ord(",") in allowed:
        return ord(",")
    if is_leaving:
        return rng.choice([token for token in allowed if token not in b"[{-\\"] or allowed)
    return rng.choice(allowed)


def is_valid(schema: Any, text: str) -> bool:
    """Whether jsonschema takes the text, formats included."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for

    kind = validator_for(schema, Draft202012Validator)
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", choices=["xgrammar", "guidance"], required=True)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--walks", type=int, default=3)
    given = parser.parse_args()
    peer = XgrammarPeer() if given.backend == "xgrammar" else GuidancePeer()
    counts = Counter[str]()
    for name, schema in schemas_in(given.folder, given.every):
        counts["schemas"] += 1
        try:
            start = peer.compile(schema)
        except Exception:
            counts["refused"] += 1
            continue
        counts["accepted"] += 1
        good, total = 0, 0
        for seed in range(given.walks):
            text = text_of(start, seed)
            if text is None:
                counts["texts without an end"] += 1
                continue
            try:
                good += is_valid(schema, text)
            except Exception:
                counts["texts that the validator cannot judge"] += 1
                continue
            total += 1
        counts["texts"] += total
        counts["valid texts"] += good
        counts["accepted schemas with a text that is not valid"] += good < total
        if good < total:
            print(f"NOT VALID {name}", flush=True)
    for what, count in counts.most_common():
        print(f"{count:6} {what}")


if __name__ == "__main__":
    main()
