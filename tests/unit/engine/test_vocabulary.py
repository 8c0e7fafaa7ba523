"""A vocabulary that was read is kept, and read anew when anything that it was read from has changed."""

import subprocess
import sys
import threading

import pytest

from engine import vocabulary
from engine.vocabulary import KEPT, forget_vocabulary, vocabulary_of
from engine.vocabulary_process import TokenizerUnusable


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def reads(monkeypatch):
    """The texts that were read, each another one."""
    texts = []

    def read(folder, vocab, stops):
        texts.append(f"{folder.name} {vocab} {stops} {len(texts)}")
        return texts[-1]

    monkeypatch.setattr(vocabulary, "read_vocabulary", read)
    return texts


def test_it_is_read_once(folder, reads):
    assert vocabulary_of(folder, 8, (2,)) == vocabulary_of(folder, 8, (2,)) == reads[0]
    assert len(reads) == 1


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "merges.txt", "tokenizer.model"])
def test_every_file_but_the_weights_counts(folder, reads, name):
    first = vocabulary_of(folder, 8, (2,))
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert vocabulary_of(folder, 8, (2,)) == first
    (folder / name).write_text('{"other": 1}')
    assert vocabulary_of(folder, 8, (2,)) != first


def test_size_stop_tokens_and_libraries_count(folder, reads, monkeypatch):
    found = {vocabulary_of(folder, 8, (2,)), vocabulary_of(folder, 9, (2,)), vocabulary_of(folder, 8, (2, 3))}
    monkeypatch.setattr(vocabulary, "version", lambda name: "0.0.1")
    assert len(found | {vocabulary_of(folder, 8, (2,))}) == 4


def test_files_whose_bytes_run_on_are_told_apart(folder, reads):
    (folder / "a").write_text("xb")
    (folder / "b").write_text("y")
    first = vocabulary_of(folder, 8, ())
    (folder / "a").write_text("x")
    (folder / "b").write_text("by")
    assert vocabulary_of(folder, 8, ()) != first


def test_what_was_forgotten_is_read_again(folder, reads):
    first = vocabulary_of(folder, 8, (2,))
    forget_vocabulary(folder, 8, (2,))
    assert vocabulary_of(folder, 8, (2,)) != first


def test_a_failure_is_not_remembered(folder, reads, monkeypatch):
    def broken(*_):
        raise TokenizerUnusable("no such tokenizer")

    with monkeypatch.context() as patch:
        patch.setattr(vocabulary, "read_vocabulary", broken)
        with pytest.raises(TokenizerUnusable):
            vocabulary_of(folder, 8, (2,))
    assert vocabulary_of(folder, 8, (2,)) == reads[0]


def test_a_cache_that_cannot_be_written_costs_a_read_each_time(folder, reads, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "file"))
    assert vocabulary_of(folder, 8, (2,)) != vocabulary_of(folder, 8, (2,))


def test_the_cache_has_a_bound(folder, reads):
    for vocab in range(KEPT + 5):
        vocabulary_of(folder, vocab, ())
    assert len(list((folder.parent / "cache/vocabularies").iterdir())) == KEPT
    count = len(reads)
    vocabulary_of(folder, KEPT + 4, ())
    assert len(reads) == count


def test_nobody_waits_for_a_reader_that_was_stopped(folder, monkeypatch):
    begun, go_on, found = threading.Event(), threading.Event(), []

    def stuck(*_):
        begun.set()
        assert go_on.wait(30)
        return "text"

    monkeypatch.setattr(vocabulary, "read_vocabulary", stuck)
    first = threading.Thread(target=lambda: found.append(vocabulary_of(folder, 8, ())), daemon=True)
    first.start()
    assert begun.wait(30)
    monkeypatch.setattr(vocabulary, "read_vocabulary", lambda *_: "text")
    assert vocabulary_of(folder, 8, ()) == "text"
    go_on.set()
    first.join(30)
    assert found == ["text"]


def test_packages_left_out_of_one_import_are_there_for_the_next():
    code = """
from engine.stand_ins import left_out
import sys
with left_out("colorsys", "json"):
    import colorsys
    assert colorsys.anything.at_all is not None
assert "colorsys" not in sys.modules
import colorsys
assert colorsys.rgb_to_hsv(0, 0, 0) == (0.0, 0.0, 0)
import json
with left_out("json"):
    import json as same
assert same is json and sys.modules["json"] is json
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
