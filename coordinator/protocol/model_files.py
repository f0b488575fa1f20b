"""The files of a model, found without importing vLLM: a folder, or Hugging Face's cache.

Reads config.json and the sizes of the weights, and finds files that are missing or cut short. For
an id that is not in the cache, Hugging Face is asked for config.json alone, within `HUB_LIMIT_S`.
"""

import http.client
import json
import math
import queue
import re
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HUB_LIMIT_S = 1.5
"""Longest wait for an answer of Hugging Face."""
HUB_TRIES = 2
"""A slow answer to the first question may be quick the second time."""
CONFIG = "config.json"
QUANTIZATION = "quantization_config"
QUANTIZATION_FILE = "hf_quant_config.json"
"""Of ModelOpt before 0.31."""
INDEX = "model.safetensors.index.json"
MISTRAL_INDEX, MISTRAL_WEIGHTS = (
    "consolidated.safetensors.index.json",
    "consolidated*.safetensors",
)
"""Mistral's own form of the weights, which may lie beside that of Hugging Face."""
TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt"),
    *("tekken.json", "tiktoken.model"),
)
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
GGUF, GGUF_INSTEAD = ".gguf", "vLLM does not load GGUF: use the model's safetensors form"
NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin", "optimizer.pt")
"""Files that end like weights and hold none."""
POINTER = b"version https://git-lfs"
"""How a file begins that Git LFS has not fetched."""
HEADER_BYTES_MAX = 100_000_000
"""Largest header of a safetensors file, by its format."""

_ID = re.compile(r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?(?:/[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?)?")
_REMOTE = re.compile(r"[a-z0-9]+://")
_ABSENT = {
    "RepoNotFound": "has no such model, or not for this user",
    "GatedRepo": "gives this model only to users who asked for it",
    "RevisionNotFound": "has no such revision of this model",
}
"""Hugging Face's error codes that will not pass -> what they mean."""


_OWN = ("architectures", "model_type", "quantization_config", "compression_config")
"""Fields that hold for the whole of a multimodal model, not for its text alone."""


class ModelFilesError(ValueError):
    """A model that cannot be loaded; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What is known of a model before it is loaded."""

    name: str
    config: Mapping[str, Any] | None
    """The contents of config.json; None if they are unknown until the model is downloaded."""
    folder: Path | None
    """Where the files are; None if they are not on this machine."""
    is_complete: bool
    """Whether all files must be there: it is a folder, or nothing can be downloaded."""
    is_unreachable: bool = False
    """Whether nothing is on this machine, and nobody answers who could be asked for the model."""

    @property
    def unreachable(self) -> str:
        """The sentence about a model that is neither here nor to be had."""
        return (
            f"the config.json of {self.name} cannot be had: Hugging Face does not answer, and its "
            "cache has no such model; name the folder of a model, or download it first."
        )

    def __post_init__(self) -> None:
        """Show the fields of a multimodal model's text as those of a text model."""
        if self.config is not None and isinstance(text := self.config.get("text_config"), dict):
            merged = {**text, **{name: self.config[name] for name in _OWN if name in self.config}}
            object.__setattr__(self, "config", {**self.config, **merged})


Fetch = Callable[[str, Mapping[str, str]], bytes]
"""Gets a URL with these headers; raises OSError."""


def find_model(
    name: str, environment: Mapping[str, str], fetch: Fetch | None = None, revision: str = ""
) -> ModelFiles:
    """Find the model; raises `ModelFilesError` with what is wrong with its path or id."""
    if _REMOTE.match(name) or environment.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return ModelFiles(name, None, None, is_complete=False)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return ModelFiles(name, _read_config(folder), folder, is_complete=True)
    if folder.is_file():
        if folder.suffix == GGUF:
            raise ModelFilesError(f"{name} is a GGUF file: {GGUF_INSTEAD}, and name its folder.")
        raise ModelFilesError(f"{name} is a file: name the folder of a model.")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelFilesError(f"{name} is no folder: check the path.")
    if not _ID.fullmatch(name) or "--" in name or ".." in name:
        raise ModelFilesError(
            f"{name!r} is neither a folder nor a model's id such as Qwen/Qwen3-8B: check it."
        )
    return _find_by_id(name, environment, fetch, revision)


def _find_by_id(
    name: str, environment: Mapping[str, str], fetch: Fetch | None, revision: str
) -> ModelFiles:
    is_offline = any(
        environment.get(key, "").upper() in ("1", "ON", "YES", "TRUE")
        for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
    cache = _cache_folder(environment)
    folder = _snapshot(cache / f"models--{name.replace('/', '--')}", revision or "main")
    if folder is not None and (folder / CONFIG).exists():
        return ModelFiles(name, _read_config(folder), folder, is_complete=is_offline)
    if is_offline:
        raise ModelFilesError(
            f"{name} is no folder, is not in the cache {cache}, and HF_HUB_OFFLINE forbids "
            "downloads: download it, or name its folder."
        )
    found = find_in_hub(name, environment, fetch, revision)
    # What is in the cache without a config.json may be a tokenizer.
    return found if folder is None else replace(found, is_unreachable=False)


def find_in_hub(
    name: str, environment: Mapping[str, str], fetch: Fetch | None = None, revision: str = ""
) -> ModelFiles:
    """Ask Hugging Face for a model's config.json alone; raises `ModelFilesError` if it has none."""
    endpoint = environment.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    token = _token(environment)
    try:
        config = json.loads(
            (fetch or get)(
                f"{endpoint}/{name}/resolve/{revision or 'main'}/{CONFIG}",
                {"Authorization": f"Bearer {token}"} if token else {},
            )
        )
    except urllib.error.HTTPError as error:
        if (reason := _ABSENT.get(error.headers.get("X-Error-Code") or "")) is not None:
            raise ModelFilesError(
                f"{name} is no folder, and {endpoint} {reason}: check the id, or set HF_TOKEN."
            ) from error
        config = None
    except ValueError:
        config = None
    except OSError as error:
        # An unknown certificate is no silence: vLLM may know its authority.
        is_silent = not isinstance(getattr(error, "reason", error), ssl.SSLError)
        return ModelFiles(name, None, None, is_complete=False, is_unreachable=is_silent)
    return ModelFiles(name, config if isinstance(config, dict) else None, None, is_complete=False)


def _token(environment: Mapping[str, str]) -> str:
    """Return the user's token for Hugging Face, or nothing."""
    if environment.get("HF_TOKEN"):
        return environment["HF_TOKEN"]
    path = environment.get("HF_TOKEN_PATH") or _cache_folder(environment).parent / "token"
    try:
        return Path(path).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _cache_folder(environment: Mapping[str, str]) -> Path:
    for key in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environment.get(key):
            return Path(environment[key]).expanduser()
    home = environment.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def _snapshot(repository: Path, revision: str) -> Path | None:
    reference = repository / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    folder = repository / "snapshots" / commit
    return folder if folder.is_dir() else None


def get(url: str, headers: Mapping[str, str]) -> bytes:
    """Get a URL within `HUB_LIMIT_S` a try, also if the names' server does not answer."""
    for _ in range(HUB_TRIES - 1):
        with suppress(TimeoutError):
            return _get_once(url, headers)
    return _get_once(url, headers)


def _get_once(url: str, headers: Mapping[str, str]) -> bytes:
    answers: queue.SimpleQueue[bytes | OSError] = queue.SimpleQueue()

    def run() -> None:
        request = urllib.request.Request(url, headers={"User-Agent": "aileron", **headers})  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=HUB_LIMIT_S) as answer:  # noqa: S310
                answers.put(bytes(answer.read()))
        except OSError as error:
            answers.put(error)
        except (ValueError, http.client.HTTPException) as error:
            answers.put(OSError(str(error)))

    threading.Thread(target=run, daemon=True).start()
    try:
        found = answers.get(timeout=HUB_LIMIT_S)
    except queue.Empty:
        raise TimeoutError(url) from None
    if isinstance(found, OSError):
        raise found
    return found


def ask_nobody(url: str, _headers: Mapping[str, str]) -> bytes:
    """Stand for a hub that does not answer."""
    raise ConnectionError(url)


def _read_config(folder: Path) -> dict[str, Any] | None:
    """Return what vLLM takes for config.json: older checkpoints keep a quantization beside it."""
    config = _read_json(folder / CONFIG)
    if config is None or config.get(QUANTIZATION) is not None:
        return config
    quantization = _read_json(folder / QUANTIZATION_FILE)
    return config if quantization is None else {**config, QUANTIZATION: quantization}


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelFilesError(f"cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ModelFilesError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} is no JSON object: get the file again.")
    return value


def missing_files(
    files: ModelFiles, load_format: str = "auto", *, weights: bool, tokenizer: bool
) -> Iterator[str]:
    """Yield a sentence for each file that is missing, not fetched or cut short."""
    folder = files.folder
    if folder is None or not files.is_complete:
        return
    if files.config is None:
        yield f"{folder} has no {CONFIG}: name the folder of a model in Hugging Face's form."
        return
    if tokenizer and not any((folder / name).exists() for name in TOKENIZERS):
        yield (
            f"{folder} has no tokenizer, such as tokenizer.json: copy it there, or add --tokenizer."
        )
    if weights:
        yield from _missing_weights(folder, load_format)


def _missing_weights(folder: Path, load_format: str) -> Iterator[str]:
    paths = weight_paths(folder, load_format)
    absent = [path.name for path in paths if not path.exists()]
    if absent:
        yield (
            f"{folder} lacks {len(absent)} of the {len(paths)} files of weights that "
            f"{_index_name(folder, load_format)} names, such as {absent[0]}: download them."
        )
    elif not paths and any(folder.glob(f"*{GGUF}")):
        yield f"{folder} has weights in a GGUF file alone: {GGUF_INSTEAD}."
    elif not paths:
        yield f"{folder} has no weights, such as model.safetensors: download them."
    for path in paths:
        if path.exists() and (sentence := _damage_of(path)) is not None:
            yield sentence
            return


def weight_paths(folder: Path, load_format: str = "auto") -> list[Path]:
    """Return the files of weights that vLLM would load, whether they exist or not."""
    index = _read_json(folder / _index_name(folder, load_format)) or {}
    named = _object(index.get("weight_map")).values()
    if names := {name for name in named if isinstance(name, str)}:
        return [folder / name for name in sorted(names)]
    consolidated = sorted(folder.glob(MISTRAL_WEIGHTS))
    if _loads_consolidated(folder, load_format):
        return consolidated
    for suffix in WEIGHT_SUFFIXES:
        found = sorted(path for path in folder.glob(f"*{suffix}") if path.name not in NO_WEIGHTS)
        if found:
            # Without an index vLLM would load the same weights twice.
            return [path for path in found if path not in consolidated] or found
    return []


def _index_name(folder: Path, load_format: str) -> str:
    return MISTRAL_INDEX if _loads_consolidated(folder, load_format) else INDEX


def _loads_consolidated(folder: Path, load_format: str) -> bool:
    """Return whether vLLM loads the weights in Mistral's form, which it prefers."""
    return load_format in ("auto", "mistral") and any(folder.glob(MISTRAL_WEIGHTS))


def _object(value: object) -> Mapping[str, Any]:
    """Return a JSON object as it is, and an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


def _damage_of(path: Path) -> str | None:
    """Return what is wrong with a file of weights, by its beginning and its size."""
    try:
        with path.open("rb") as file:
            head = file.read(max(8, len(POINTER)))
            if head.startswith(POINTER):
                return f"{path} is a pointer of Git LFS, not the file: run `git lfs pull` there."
            if path.suffix != ".safetensors":
                return None
            size = int.from_bytes(head[:8], "little")
            if len(head) < 8 or size > HEADER_BYTES_MAX:
                return f"{path} is no safetensors file: download it again."
            file.seek(8)
            header = json.loads(file.read(size))
        ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
        expected = 8 + size + max(ends, default=0)
        actual = path.stat().st_size
    except OSError as error:
        return f"cannot read {path}: {error.strerror}."
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{path} is no safetensors file: download it again."
    if actual < expected:
        return f"{path} is cut short, {actual} of {expected} bytes: download it again."
    return None


def weight_bytes(files: ModelFiles, load_format: str = "auto") -> int:
    """Return the bytes of all weights by their files or their index; 0 if they are not known."""
    if files.folder is None:
        return 0
    index = _read_json(files.folder / _index_name(files.folder, load_format)) or {}
    total = _object(index.get("metadata")).get("total_size")
    if isinstance(total, int | float) and total > 1 and math.isfinite(total):
        return int(total)
    paths = weight_paths(files.folder, load_format)
    return sum(path.stat().st_size for path in paths if path.exists())
