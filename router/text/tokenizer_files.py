"""Checks of a model folder's tokenizer files before a library reads them: sizes, and rules that multiply a
text."""

from pathlib import Path
from typing import Any, cast

from baton.core.errors import SetupError
from engine.model_files.json_files import read_json_object

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
OTHER_FILES = (
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "chat_template.jinja",
)
BYTES_MAX = 256 * 2**20
"""Largest tokenizer file; those of 250,000 tokens have 35 MB."""
INSERTED_CHARACTERS_MAX = 256
"""Longest text that a normaliser may put in place of another or before a text."""
STEPS_MAX = 64
"""Most steps of one kind, and most pieces of the template around a text."""
DEPTH_MAX = 8


def check_tokenizer_files(folder: Path) -> None:
    """Raises SetupError: a file is too large or no regular file, its JSON is damaged, or a rule would make a
    short prompt a very long one."""
    for name in (*FILES, *OTHER_FILES):
        path = folder / name
        if path.exists() and (not path.is_file() or path.stat().st_size > BYTES_MAX):
            raise SetupError(f"{path} is no regular file of at most {BYTES_MAX} bytes; download it anew")
    for name in FILES:
        content = read_json_object(folder / name, bytes_max=BYTES_MAX)
        if content is not None and name == "tokenizer.json":
            _check_rules(content, folder / name)


def largest_id(pretrained: Any) -> int:
    """The largest token id that a tokenizer may give; -1 if it has none."""
    return max(cast(dict[str, int], pretrained.get_vocab()).values(), default=-1)


def _check_rules(content: dict[str, Any], path: Path) -> None:
    for kind in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        steps = _steps(content.get(kind), path, 0)
        if len(steps) > STEPS_MAX:
            raise SetupError(f"{path}: {kind} has {len(steps)} steps, which is more than {STEPS_MAX}")
        for step in steps:
            inserted: object = step.get("content") or step.get("prepend")
            if kind == "normalizer" and isinstance(inserted, str) and len(inserted) > INSERTED_CHARACTERS_MAX:
                raise SetupError(
                    f"{path}: its normalizer inserts {len(inserted)} characters, which is more than "
                    f"{INSERTED_CHARACTERS_MAX}"
                )
            pieces: object = step.get("single")
            if isinstance(pieces, list) and len(cast(list[Any], pieces)) > STEPS_MAX:
                raise SetupError(f"{path}: its {kind} puts more than {STEPS_MAX} pieces around a text")


def _steps(part: object, path: Path, depth: int) -> list[dict[str, Any]]:
    if depth > DEPTH_MAX:
        raise SetupError(f"{path}: its steps lie more than {DEPTH_MAX} deep in one another")
    if not isinstance(part, dict):
        return []
    step = cast(dict[str, Any], part)
    inner: list[object] = []
    for name in ("normalizers", "pretokenizers", "processors", "decoders"):
        found: object = step.get(name)
        inner += cast(list[object], found)[: STEPS_MAX + 1] if isinstance(found, list) else []
    return [step] + [one for each in inner for one in _steps(each, path, depth + 1)]
