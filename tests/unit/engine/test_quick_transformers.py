"""transformers offers the same however it is imported, and its models are read once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import sys
sys.modules["torch"] = None
from engine.model_files import quick_transformers
"""


def run(code: str, cache: Path) -> str:
    environment = {**os.environ, "BATON_CACHE_DIR": str(cache), "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A cache to which one import has written."""
    cache = tmp_path_factory.mktemp("cache")
    run("quick_transformers.import_transformers()", cache)
    assert len(list((cache / "transformers").iterdir())) == 1
    return cache


def test_what_is_kept_is_what_transformers_finds(cache):
    run(
        """
from pathlib import Path
quick_transformers.import_transformers()
import transformers
from transformers.utils.import_utils import create_import_structure_from_path as remembered
models = Path(transformers.__file__).parent / "models"
assert remembered(models) == remembered._theirs(models) == remembered(str(models / "__init__.py"))
assert len(remembered(models)) > 100
""",
        cache,
    )


def test_its_models_are_not_read_again(cache):
    run(
        """
known, found, read = quick_transformers._read, [], []
quick_transformers._read = lambda file: found.append(known(file)) or found[-1]
quick_transformers.import_transformers()
import transformers.utils.import_utils as utils
remembered = utils.create_import_structure_from_path
theirs = remembered._theirs
remembered._theirs = lambda path: read.append(path) or theirs(path)
from transformers import LlamaConfig
from transformers.models.llama import LlamaConfig as same
assert same is LlamaConfig
assert len(found) == 2 and all(found), "once for the package and once for its models"
assert len(read) < 10, "the folders of models that were asked for"
""",
        cache,
    )


@pytest.mark.parametrize("content", [b"", b"{", b"5", b'{"pairs": []}', b"[" * 200_000])
def test_a_broken_file_is_read_and_written_anew(cache, tmp_path, content):
    (file,) = (cache / "transformers").iterdir()
    broken = tmp_path / "transformers" / file.name
    broken.parent.mkdir()
    broken.write_bytes(content)
    run("quick_transformers.import_transformers()", tmp_path)
    assert broken.read_bytes() == file.read_bytes()


def test_another_version_is_imported_in_its_own_way(tmp_path):
    run(
        """
def fails(module):
    import importlib
    importlib.import_module("transformers.utils")
    raise AttributeError("this version has other modules")
quick_transformers._without_its_models = fails
quick_transformers.import_transformers()
import transformers
assert transformers.LlamaConfig().model_type == "llama"
""",
        tmp_path,
    )
    assert not (tmp_path / "transformers").exists()


def test_an_import_after_another_changes_nothing(tmp_path):
    run(
        """
import transformers
quick_transformers.import_transformers()
assert sys.modules["transformers"] is transformers
""",
        tmp_path,
    )
