"""How much of public JSON schema suites structured output accepts, and whether its texts are valid.

    python -m benchmarks.structured_suite FOLDER [--every N] [--walks N]

FOLDER has JSON files: single schemas (JSONSchemaBench) or lists of {"schema": …} (the official
JSON-Schema-Test-Suite). A schema counts as accepted if the judge takes it; random texts of the compiled
grammar are validated with jsonschema. Neither suite is part of this repository.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baton.core.errors import ClientError
from baton.core.sampling import Grammar, GrammarKind
from engine.structured.schemas import check_schema
from router.openai.response_format import schema_grammar

END = 256
PATIENCE = 80
"""Bytes after which a walk takes the way out wherever there is one."""
BYTES_MAX = 6000


class SuiteWalker:
    """Random texts of a compiled grammar, over a vocabulary of single bytes."""

    def __init__(self) -> None:
        from xgrammar import GrammarCompiler, TokenizerInfo

        words = [bytes([byte]) for byte in range(256)] + [b"<end>"]
        info = TokenizerInfo(words, vocab_size=len(words), stop_token_ids=[END])
        self._compiler = GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._words = words

    def compile(self, grammar: Grammar) -> Any:
        """Return what makes a new matcher of the grammar."""
        from xgrammar import GrammarMatcher

        from engine.grammar_compile import TextMatcher, compile_grammar
        from engine.unique_items import TokenBytes, UniqueItemsMatcher, scanner_of

        compiled, scanner = compile_grammar(self._compiler, grammar), scanner_of(grammar)

        def matcher() -> Any:
            plain = TextMatcher(GrammarMatcher(compiled))
            return plain if scanner is None else UniqueItemsMatcher(plain, scanner, TokenBytes(self._words))

        return matcher

    def text(self, compiled: Any, seed: int) -> str | None:
        """Return one text; None: it did not end."""
        from engine.sampling.masks import mask_of

        rng, matcher, text = random.Random(seed), compiled(), bytearray()
        mask = mask_of((), len(self._words))
        while len(text) < BYTES_MAX:
            matcher.fill(mask)
            bits = mask.view("uint32")
            allowed = [token for token in range(257) if bits[token // 32] >> (token % 32) & 1]
            # White space is dull. After 0xED xgrammar allows halves of surrogate pairs, which no UTF-8 has.
            dull = [token for token in allowed if token > 0x20 and token != 0xED] or allowed
            token = _chosen(rng, dull, is_leaving=len(text) > PATIENCE)
            if token == END:
                return text.decode()
            if not matcher.accept(token):
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


def schemas_in(folder: Path, every: int) -> Iterator[tuple[str, Any]]:
    """Name and schema of every `every`-th file's schemas."""
    for path in sorted(folder.rglob("*.json"))[::every]:
        content = json.loads(path.read_text())
        if isinstance(content, list):
            for number, case in enumerate(content):
                yield f"{path.name}[{number}]", case["schema"]
        else:
            yield path.name, content


def judged(schema: Any) -> Grammar | str:
    """The grammar of a schema, or the keyword for which it is refused."""
    try:
        if isinstance(schema, bool):
            return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(check_schema(schema, "schema")))
        return schema_grammar(schema, "schema")
    except ClientError as error:
        return str(error.param).rpartition(".")[2]


def run(folder: Path, every: int, walks: int) -> Counter[str]:
    """Count what became of each schema, and print the texts that are not valid."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for

    walker, counts = SuiteWalker(), Counter[str]()
    for name, schema in schemas_in(folder, every):
        counts["schemas"] += 1
        grammar = judged(schema)
        if isinstance(grammar, str):
            counts[f"refused for {grammar}"] += 1
            continue
        try:
            compiled = walker.compile(grammar)
        except Exception as error:
            counts["refused by the compiler"] += 1
            print(f"{name}: {error}"[:200])
            continue
        counts["accepted"] += 1
        for seed in range(walks):
            text = walker.text(compiled, seed)
            if text is None:
                counts["texts without an end"] += 1
                continue
            counts["texts"] += 1
            try:
                validator = validator_for(schema, Draft202012Validator)
                form = validator.FORMAT_CHECKER
                is_valid = validator(schema, format_checker=form).is_valid(json.loads(text))
            except Exception as error:
                counts["texts that the validator cannot judge"] += 1
                print(f"{name}: {type(error).__name__}: {error}"[:200])
                continue
            counts["valid texts"] += is_valid
            if not is_valid:
                print(f"NOT VALID {name}: {text[:200]}")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--walks", type=int, default=3)
    given = parser.parse_args()
    counts = run(given.folder, given.every, given.walks)
    for what, count in counts.most_common():
        print(f"{count:6} {what}")


if __name__ == "__main__":
    main()
