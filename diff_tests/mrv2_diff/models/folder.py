"""Says in one sentence why a folder is no checkpoint, before an engine spends a minute on it."""

import json
from pathlib import Path

REMEDY = "name a folder with config.json and *.safetensors, or make one: mrv2-diff make-model DIR"


class ModelFolderError(ValueError):
    """The folder given as a model is not one."""


def check_model_folder(directory: Path) -> None:
    """Return if `directory` looks like a checkpoint.

    Raises:
        ModelFolderError: It does not. Names the folder, what is missing or broken, and the remedy.
    """
    if not directory.is_dir():
        raise ModelFolderError(f"model folder {directory} does not exist or is a file; {REMEDY}")
    config = _read_config(directory)
    if not config.get("architectures"):
        raise ModelFolderError(f"{directory / 'config.json'} names no 'architectures'; {REMEDY}")
    weights = [path for pattern in ("*.safetensors", "*.bin") for path in directory.glob(pattern)]
    if not weights:
        raise ModelFolderError(f"model folder {directory} holds no weights; {REMEDY}")
    empty = [path.name for path in weights if path.stat().st_size == 0]
    if empty:
        raise ModelFolderError(f"weights {empty[0]!r} in {directory} are an empty file; {REMEDY}")


def _read_config(directory: Path) -> dict[str, object]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFolderError(f"model folder {directory} has no config.json; {REMEDY}") from error
    except OSError as error:
        raise ModelFolderError(f"{path} cannot be read: {error.strerror}; {REMEDY}") from error
    except ValueError as error:
        raise ModelFolderError(f"{path} is not JSON ({error}); {REMEDY}") from error
    if not isinstance(config, dict):
        raise ModelFolderError(f"{path} holds no JSON object; {REMEDY}")
    return config
