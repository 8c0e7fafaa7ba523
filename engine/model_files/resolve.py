"""Model folders: the one on this machine that the operator named, or a download from the hub."""

import contextlib
from pathlib import Path

from baton.core.errors import SetupError
from engine.model_files.gguf.folder import gguf_in, unpack_gguf

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt", "*.tiktoken")
HUB_S = 10.0
"""The time in which the hub must answer before a cluster starts."""
FILES_WITHOUT_WEIGHTS = tuple(pattern for pattern in MODEL_FILES if pattern != "*.safetensors")


def local_folder(path_or_hub_id: str, *, what: str = "model") -> Path | None:
    """The model's folder on this machine; None for a hub id. A GGUF file, or a folder with one, gives the
    folder that stands for it.

    Raises SetupError if nothing is given, if the path leads to nothing or to a file that is no model, or see
    `unpack_gguf`.
    """
    if not path_or_hub_id:
        raise SetupError(f"no {what} given: name a Hugging Face folder or hub id")
    try:
        path = Path(path_or_hub_id).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, a null character, nobody's home
        raise SetupError(f"{what} {path_or_hub_id!r:.100} is no path: {error}") from error
    gguf = gguf_in(path)
    if gguf is not None:
        return unpack_gguf(gguf)
    if path.is_dir():
        return path
    if path.exists():
        raise SetupError(f"{path_or_hub_id} is a file; wanted is a folder, a .gguf file or a hub id")
    if path_or_hub_id.startswith(("/", ".", "~")) or path_or_hub_id.count("/") != 1:
        raise SetupError(f"{what} folder {path_or_hub_id} does not exist")
    return None


def resolve_model(
    path_or_hub_id: str, revision: str = "main", *, files: tuple[str, ...] = MODEL_FILES, what: str = "model"
) -> Path:
    """The local folder, downloaded from the hub if it is not on this machine.

    files: patterns of those wanted. Raises SetupError: see `local_folder`, or it cannot be downloaded.
    """
    folder = local_folder(path_or_hub_id, what=what)
    return folder if folder is not None else _download(path_or_hub_id, revision, files)


def check_available(hub_id: str, revision: str = "main") -> None:
    """Check that a model of the hub is on this machine at least in part, or that the hub has it and answers
    within HUB_S. Raises SetupError."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        with contextlib.suppress(LocalEntryNotFoundError):
            snapshot_download(hub_id, revision=revision, allow_patterns=["*.json"], local_files_only=True)
            return
        HfApi().model_info(hub_id, revision=revision, timeout=HUB_S)
    except (HfHubHTTPError, HFValidationError) as error:
        raise _not_downloaded(hub_id, error) from error
    except Exception as error:  # of whichever HTTP library this version of the client has
        raise _unreachable(hub_id) from error


def _download(hub_id: str, revision: str, files: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(files)))
    except LocalEntryNotFoundError as error:
        raise _unreachable(hub_id) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise _not_downloaded(hub_id, error) from error


def _unreachable(hub_id: str) -> SetupError:
    return SetupError(
        f"{hub_id} is no folder here, and the Hugging Face hub cannot be reached to download it"
    )


def _not_downloaded(hub_id: str, error: Exception) -> SetupError:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return SetupError(f"{hub_id} is no folder here and cannot be downloaded from the hub: {first_line}")
