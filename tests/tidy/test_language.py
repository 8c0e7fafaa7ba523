"""Language that a machine can check: docstrings are sentences that stand where they belong."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FRAGMENT_WORDS = (
    *("Of", "That", "Who", "Whom", "Whose", "Which", "With", "Without", "For", "From", "By"),
    *("Beside", "Besides", "Beyond", "Into", "Onto", "On", "To", "Until", "Under", "Over", "Between"),
    *("Among", "Against", "Through", "Within", "Than", "About", "Behind", "Upon", "Towards", "Per", "Like"),
)
"""A docstring that begins with a bare preposition or relative pronoun can only be read with its name."""
FRAGMENT = re.compile(rf"[\"'`(*\s]*(?:{'|'.join(FRAGMENT_WORDS)})\b")


def tracked_python() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in names if "/proto/" not in name and (ROOT / name).is_file()]


def strings_alone(body: list[ast.stmt]) -> Iterator[tuple[int, ast.Expr, ast.stmt | None]]:
    """(index, statement, statement before it) of every string that stands alone in a body."""
    before: ast.stmt | None = None
    for index, statement in enumerate(body):
        if (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Constant)
            and isinstance(statement.value.value, str)
        ):
            yield index, statement, before
        before = statement


def bodies(tree: ast.AST) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            yield node, body


def fragments(path: Path) -> Iterator[str]:
    for _, body in bodies(ast.parse(path.read_text())):
        for _, statement, _ in strings_alone(body):
            text = ast.literal_eval(statement.value)
            if FRAGMENT.match(text):
                yield f"{path.relative_to(ROOT)}:{statement.lineno}: {text.strip().splitlines()[0][:80]}"


def detached(path: Path) -> Iterator[str]:
    """Strings that document nothing: they neither open a module, class or function nor follow a name."""
    homes = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for owner, body in bodies(ast.parse(path.read_text())):
        for index, statement, before in strings_alone(body):
            opens = index == 0 and isinstance(owner, homes)
            after_a_name = isinstance(before, ast.Assign | ast.AnnAssign)
            if not opens and not after_a_name:
                yield f"{path.relative_to(ROOT)}:{statement.lineno}: follows nothing that it could document"


def test_docstrings_are_no_fragments():
    assert [found for path in tracked_python() for found in fragments(path)] == []


def test_docstrings_stand_where_they_belong():
    assert [found for path in tracked_python() for found in detached(path)] == []


def test_fragments_and_detached_docstrings_would_be_noticed(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "a.py"
    path.write_text(
        '"""A module."""\nx = 1\n"""Of x: its value."""\n\ndef f():\n    """Do."""\n\n"""Lost."""\n'
    )
    assert len(list(fragments(path))) == 1
    assert len(list(detached(path))) == 1


def test_every_decision_page_is_in_the_index():
    folder = ROOT / "docs" / "decisions"
    pages = {p.name for p in folder.glob("[0-9]*.md")}
    linked = set(re.findall(r"\(([0-9]{4}-[a-z0-9-]+\.md)\)", (folder / "README.md").read_text()))
    assert pages == linked
    numbers = [name[:4] for name in sorted(pages)]
    assert numbers == sorted(set(numbers)), "two decisions have one number"
