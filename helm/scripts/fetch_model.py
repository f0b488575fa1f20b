# ruff: noqa: INP001
"""Fetches a model from Hugging Face into a folder, once: `all`, `tokenizer` or `wait`.

`all` fetches every file that serving needs, `tokenizer` all but the weights, and `wait` waits until
another pod has fetched all. A marker file, written last, names what the folder holds.
"""

import os
import shutil
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

MARKER = ".aileron-complete"
NOT_SERVED = ("original/*", "*.pth", "*.pt", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.tflite")
"""Other forms of the same weights."""
WEIGHTS = ("*.safetensors", "*.bin")
PAUSE_S = 5.0
GIB = 1024**3


def is_complete(folder: Path, wanted: str) -> bool:
    """Return whether the folder holds these files already."""
    marker = folder / MARKER
    return marker.is_file() and marker.read_text() == wanted


def fetch(model: str, revision: str, folder: Path, ignored: tuple[str, ...]) -> None:
    """Download what is missing; raises what huggingface_hub does, or ValueError without space."""
    info = HfApi().model_info(model, revision=revision, files_metadata=True)
    names = [each for each in info.siblings or () if not _matches(each.rfilename, ignored)]
    there = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
    needed = sum(each.size or 0 for each in names) - there
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"{model} needs {needed / GIB:.1f} GiB more, and {folder} has {free / GIB:.1f} GiB: "
            "raise models.download.size."
        )
    snapshot_download(model, revision=revision, local_dir=folder, ignore_patterns=list(ignored))


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, each) for each in patterns)


def wait(folder: Path, wanted: str, limit_s: float) -> bool:
    """Return whether the files are there before the limit."""
    end_s = time.monotonic() + limit_s
    while not is_complete(folder, wanted):
        if time.monotonic() >= end_s:
            return False
        print(f"waiting for the Job that fetches the model into {folder}", flush=True)
        time.sleep(PAUSE_S)
    return True


def main(files: str) -> int:
    """Do it; print the problem, and return 0 if the files are there."""
    model, revision = os.environ["MODEL_ID"], os.environ["MODEL_REVISION"]
    folder = Path(os.environ["MODEL_FOLDER"])
    kind = "tokenizer" if files == "tokenizer" else "all"
    wanted = f"{model}@{revision} {kind}\n"
    if files == "wait":
        if wait(folder, wanted, float(os.environ["WAIT_SECONDS"])):
            return 0
        print("the Job that fetches the model has not ended: look at its log")
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    if is_complete(folder, wanted):
        print(f"{folder} holds {model} already")
        return 0
    ignored = (*NOT_SERVED, *WEIGHTS) if kind == "tokenizer" else NOT_SERVED
    try:
        fetch(model, revision, folder, ignored)
    except Exception as error:  # noqa: BLE001  whatever huggingface_hub's HTTP client raises
        print(f"{model} cannot be fetched: {error}")
        return 1
    part = folder / f"{MARKER}.part"
    part.write_text(wanted)
    part.replace(folder / MARKER)
    print(f"{folder} holds {model}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] not in (["all"], ["tokenizer"], ["wait"]):
        sys.exit("usage: fetch_model.py all|tokenizer|wait")
    sys.exit(main(sys.argv[1]))
