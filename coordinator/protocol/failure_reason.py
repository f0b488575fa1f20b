"""The reason of a failed start in one sentence. Pure.

An error that code raises itself says what is wrong. An error that Python raises because code met
what it did not expect ("too many values to unpack") says nothing to a user: its place does.
"""

import errno
import re
import traceback
from pathlib import PurePath

from pydantic import ValidationError

from coordinator.protocol.mistakes import sentences_of

OWN_PACKAGES = ("comm_pool", "coordinator", "gateway", "kvadaptor", "worker")
NO_ROOM = ("OutOfMemoryError", "MemoryError")
NO_ROOM_OF_TORCH = "can't allocate memory"
"""In the message of torch's allocator on CPU, whose error has no class of its own."""
_MISSING_KERNEL = re.compile(r"\b_C::(\w+)\(\) expected at most 0 argument")
"""vLLM's CPU build names kernels that it does not have, and declares them without arguments."""
REASON_CHARS_MAX = 600

_BY_PYTHON = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError),
    *(RecursionError, TypeError, ValueError),
)
"""Errors that Python raises by itself in code that is wrong, or wrong for this model."""


def reason_of(error: BaseException) -> str:
    """Return what to tell the user; the log has the traceback."""
    kind = type(error)
    if (kernel := _MISSING_KERNEL.search(str(error))) is not None:
        return (
            f"this build of vLLM has no kernel {kernel[1]} for this device: serve a checkpoint "
            "that is quantized otherwise, or not at all."
        )
    if kind.__module__.split(".")[0] in OWN_PACKAGES:
        return _one_line(str(error))
    if _lacks_memory(error):
        return (
            "there is no room in memory for the model and its KV: use fewer --ranks, or "
            "--weight-parts, or lower --kv-cache-memory-bytes, --max-model-len or --max-num-seqs "
            "after the --."
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        place = error.filename or "the disk of the run folder, or the memory of /dev/shm,"
        return f"{place} is full: free space there, or start the container with --shm-size=1g."
    if isinstance(error, ValidationError):
        return sentences_of(error)
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    if last is None or (last.line or "").lstrip().startswith("raise") or isinstance(error, OSError):
        return _one_line(str(error)) or kind.__name__
    place = f"{_short(last.filename)}, line {last.lineno}"
    detail = "" if isinstance(error, _BY_PYTHON) else f": {_one_line(str(error))}"
    return (
        f"the code that builds or runs this model failed ({kind.__name__} in {place}{detail}): the "
        "log has the traceback; report it with the model's config.json."
    )


def _lacks_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    is_torch = isinstance(error, RuntimeError) and NO_ROOM_OF_TORCH in str(error)
    return is_torch or type(error).__name__ in NO_ROOM


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= REASON_CHARS_MAX else f"{line[:REASON_CHARS_MAX]} …"


def _short(path: str) -> str:
    """Return a path below the folder of installed packages."""
    parts = PurePath(path).parts
    if "site-packages" in parts:
        parts = parts[parts.index("site-packages") + 1 :]
    return "/".join(parts[-4:])
