"""Entry point: writes the generated files into the folder that is named."""

import sys
from pathlib import Path

from baton.wire.generate.declared import sections
from baton.wire.generate.kinds import DeclarationError
from baton.wire.generate.mapping_file import mapping_file
from baton.wire.generate.proto_file import proto_file

COMMITTED = Path(__file__).parents[1] / "proto" / "baton.proto"


def generated(committed: str) -> dict[str, str]:
    """Texts of the generated files by name. `committed` is baton.proto as it was."""
    found = sections()
    proto = proto_file(found, committed)
    return {"baton.proto": proto, "mapping.py": mapping_file(found, proto)}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    committed = COMMITTED.read_text() if COMMITTED.exists() else ""
    for name, text in generated(committed).items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except DeclarationError as error:
        sys.exit(str(error))
