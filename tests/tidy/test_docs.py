"""The documentation names only files, commands, options, settings, metrics and links that exist."""

import itertools
import re
from fnmatch import fnmatch
from functools import cache
from pathlib import PurePosixPath

import pytest
import yaml
from typer.main import get_command

import commands.parts
from baton.config import Config
from baton.telemetry.catalogue import CATALOGUE
from commands.app import app
from tests.tidy.test_tidy import ROOT, tracked

DOCS = tracked("README.md", "docs/*.md", "docs/**/*.md")
FILES = [str(path.relative_to(ROOT)) for path in tracked()]
FOLDERS = {str(folder) for name in FILES for folder in PurePosixPath(name).parents}
TOP_FOLDERS = "|".join(sorted(name for name in FOLDERS if name.isidentifier()))


def inline_code(text):
    without_blocks = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", without_blocks)]


def code_lines(text):
    """Lines of fenced and indented blocks; lines that a backslash continues are joined."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"(?:^    .*\n)+", text, flags=re.MULTILINE)
    return [
        line.strip() for block in (*fenced, *indented) for line in block.replace("\\\n", " ").splitlines()
    ]


# Files and folders


def is_there(name):
    return any(file == name or file.endswith(f"/{name}") for file in FILES)


def missing_files(text):
    for code in inline_code(text):
        is_file = re.fullmatch(r"[\w./-]+\.(?:py|proto|cpp|h)", code)
        if is_file and not is_there(code) and "NAME" not in code:  # NAME: a file that the reader will write
            yield code
        if re.fullmatch(rf"(?:{TOP_FOLDERS})/[\w/-]*", code):
            name = code.rstrip("/")
            if name not in FOLDERS and not is_there(name) and f"{name}.py" not in FILES:
                yield code


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_documentation_names_exist(page):
    assert list(missing_files(page.read_text())) == []


# Commands and options


def loaded(command):
    """Load a command that another package implements, without running it. Return any other as it is."""
    if command.add_help_option:
        return command
    parts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands.parts, "run_app", lambda part, **_: parts.append(part))
        command.main([], prog_name="baton", standalone_mode=False)
    return get_command(parts[0])


def command_lines(text):
    """The words after `baton` of every command line in the text, without quoted texts, comments and pipes.

    In tables, `a\\|b` stands for either of two words.
    """
    for line in (*code_lines(text), *inline_code(text)):
        plain = re.sub(r"'[^']*'|\"[^\"]*\"", "TEXT", line.replace("\\|", "¦"))
        if found := re.match(r"(?:[A-Z_]+=\S* )?(?:\S*/)?baton (?!is )([^#>|&;]*)", plain):
            alternatives = [word.split("¦") for word in found[1].split()]
            yield from (list(words) for words in itertools.product(*alternatives))


@cache
def known_options(words):
    """Return the options that a command accepts, or None if there is no such command."""
    command = get_command(app)
    for word in words:
        command = loaded(command.commands[word]) if word in getattr(command, "commands", {}) else None
        if command is None:
            return None
    options = {"--help", "-h"} | {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    return options, hasattr(command, "commands")


def wrong_words(words):
    """The first words of a command line must be commands, and its options must be known to that command."""
    named, rest = (), words
    while rest and re.match(r"[a-z]", rest[0]) and known_options(named)[1]:
        named, rest = (*named, rest[0]), rest[1:]
        if known_options(named) is None:
            return [named[-1]]
    options = [found[0] for word in rest if (found := re.match(r"--?[a-z][a-z-]*", word.lstrip("[")))]
    return [option for option in options if option not in known_options(named)[0]]


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_that_documentation_names_exist(page):
    lines = list(command_lines(page.read_text()))
    wrong = {" ".join(words): found for words in lines if (found := wrong_words(words))}
    assert wrong == {}


def test_a_wrong_command_and_a_wrong_option_are_noticed():
    text = "```\nbaton serve --both 2 \\\n  --port 1 # --no\nbaton store look\n```\n`baton bench nothing`"
    wrong = [wrong_words(words) for words in command_lines(text)]
    assert wrong == [["--both"], ["look"], ["nothing"]]


# Settings and metrics

SECTIONS = Config.model_json_schema()["properties"]
VALUES = yaml.safe_load((ROOT / "deploy/helm/baton/values.yaml").read_text())
ACCOUNTS = {"store.predicted_load_s", "store.actual_load_s", "experts.worst_layer"}
"""Figures that workers report under names like those of settings."""


def is_setting(section, field):
    annotation = Config.model_fields[section].annotation if section in SECTIONS else None
    fields = getattr(annotation, "model_fields", {"": None})
    is_value = section in VALUES and field in (VALUES[section] or {})
    return is_value or any(fnmatch(name, field.replace("…", "*")) for name in fields) or "" in fields


def unknown_settings(text):
    named = [code for code in inline_code(text) if not code.endswith((".py", ".md", ".h"))]
    named += re.findall(r"--set '?([a-z_.]+=)", text)
    environment = re.findall(r"\bBATON_([A-Z]+)__([A-Z_]+)", text)
    found = [
        match.groups()
        for name in named
        if (match := re.match(r"([a-z_]+)\.([a-z_*…][a-zA-Z_*…]*)(?=$|[.=≥ ])", name))
    ]
    found += [(section.lower(), field.lower()) for section, field in environment]
    for section, field in found:
        is_module = f"{section}/{field}" in FOLDERS or f"{section}/{field}.py" in FILES
        is_known = is_module or section not in SECTIONS or f"{section}.{field}" in ACCOUNTS
        if not is_known and not is_setting(section, field):
            yield f"{section}.{field}"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_that_documentation_names_exist(page):
    assert list(unknown_settings(page.read_text())) == []


def test_an_unknown_setting_is_noticed():
    assert list(unknown_settings("`cluster.both_workers`, `store.py`, `transfer.lease_s=3`")) == [
        "cluster.both_workers"
    ]


METRICS = {metric.name for metric in CATALOGUE}


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_metrics_that_documentation_names_exist(page):
    """A name that ends in an underscore is the beginning of several."""
    named = {
        re.sub(r"_(?:bucket|sum|count)$", "", name)
        for name in re.findall(r"\bbaton_[a-z0-9_]+\b(?!\.)", page.read_text())
    }
    unknown = {
        name
        for name in named - METRICS
        if not (name.endswith("_") and any(m.startswith(name) for m in METRICS))
    }
    assert unknown == set()


# Links


def anchors(page):
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page):
    without_code = re.sub(r"^```.*?^```|`[^`]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code):
        name, _, anchor = target.partition("#")
        if "://" in name:
            continue
        other = page.parent / name if name else page
        if not other.exists() or (anchor and anchor not in anchors(other)):
            yield target


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert list(dead_links(page)) == []


def test_a_dead_link_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One `heading`\n[here](#one-heading) [there](other.md) [nowhere](#two)")
    assert list(dead_links(page)) == ["other.md", "#two"]
