"""One rule for all folders of the cache."""

from pathlib import Path

from baton.files.cache import cache_folder


def test_the_own_variable_then_the_desktops_then_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/x")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("BATON_CACHE_DIR", raising=False)
    assert cache_folder("gguf") == Path("/home/x/.cache/baton/gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert cache_folder("gguf") == Path("/c/baton/gguf")
    monkeypatch.setenv("BATON_CACHE_DIR", "/b")
    assert cache_folder("native") == Path("/b/native")
