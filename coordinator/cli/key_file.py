"""Changes of a file of API keys that keep its comments and its form.

The text is edited where the entry stands, read again, and compared with the keys that it should
hold; only then the file is replaced as a whole, so no reader sees half of it. A lock on the folder
lets one change happen at a time.
"""

import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import yaml

from coordinator.cli.errors import USAGE_STATUS, CliError
from coordinator.protocol.config import ConfigError
from coordinator.protocol.keys import ApiKey, dump_key, load_keys, read_keys

FILE_MODE = 0o600

Keys = dict[str, ApiKey]


def read_file(path: Path) -> Keys:
    """Return the file's keys by hash; raises `CliError`."""
    try:
        return load_keys(path)
    except ConfigError as error:
        raise CliError(str(error), USAGE_STATUS) from error


def add_key(path: Path, make: Callable[[Keys], ApiKey]) -> ApiKey:
    """Add the key that `make` returns for the file's keys, and return it; raises `CliError`.

    A file that does not exist begins empty.
    """

    def change(text: str, keys: Keys) -> tuple[str, ApiKey]:
        key = make(keys)
        return with_entry(text, key), key

    return _change(path, change)


def revoke_key(path: Path, find: Callable[[Keys], ApiKey], now: datetime) -> ApiKey:
    """Mark the key that `find` returns as revoked, and return it; raises `CliError`."""

    def change(text: str, keys: Keys) -> tuple[str, ApiKey]:
        key = find(keys)
        if key.revoked is not None:
            return text, key
        revoked = key.model_copy(update={"revoked": now})
        return with_revocation(text, revoked), revoked

    if not path.exists():
        raise CliError(f"{path} does not exist: check --file.", USAGE_STATUS)
    return _change(path, change)


def with_entry(text: str, key: ApiKey) -> str:
    """Return a file's text with one more entry, in the style of the list that is there."""
    text = text.replace("keys: []", "keys:").rstrip("\n")
    text = f"{text}\n" if text else ""
    entries = _entries(text)
    if entries is None:
        text += "keys:\n"
    if isinstance(entries, yaml.SequenceNode) and entries.flow_style:
        text = _with_block_list(text, entries)
        entries = _entries(text)
    indent = entries.start_mark.column if isinstance(entries, yaml.SequenceNode) else 2
    return text + dump_key(key, indent)


def with_revocation(text: str, key: ApiKey) -> str:
    """Return a file's text with the time of revocation in the entry of a key."""
    entries = _entries(text)
    for entry in entries.value if isinstance(entries, yaml.SequenceNode) else ():
        fields = entry.value if isinstance(entry, yaml.MappingNode) else []
        found = {name.value: value for name, value in fields}
        if "hash" in found and found["hash"].value == key.hash:
            break
    else:
        return text
    assert key.revoked is not None
    field = f"revoked: '{_text_of(key.revoked)}'"
    last_name, last_value = fields[-1]
    at = last_value.end_mark.index
    if entry.flow_style:
        return f"{text[:at]}, {field}{text[at:]}"
    end = text.find("\n", at)
    head, tail = (text + "\n", "") if end < 0 else (text[: end + 1], text[end + 1 :])
    return f"{head}{' ' * last_name.start_mark.column}{field}\n{tail}"


def _text_of(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def _entries(text: str) -> yaml.Node | None:
    """Return the node of the list of keys."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    return next((value for name, value in pairs if name.value == "keys"), None)


def _with_block_list(text: str, entries: yaml.SequenceNode) -> str:
    """Return the text with a list in brackets written as one with dashes."""
    plain = yaml.SafeLoader("")
    values = plain.construct_document(entries)
    lines = yaml.safe_dump(values, sort_keys=False).splitlines()
    block = "".join(f"\n  {line}" for line in lines)
    return text[: entries.start_mark.index].rstrip() + block + text[entries.end_mark.index :]


def _change(path: Path, change: Callable[[str, Keys], tuple[str, ApiKey]]) -> ApiKey:
    try:
        # A symbolic link stays one: its target is replaced.
        path = path.resolve()
        with _locked(path.parent):
            text = path.read_text(encoding="utf-8-sig") if path.exists() else ""
            keys = read_keys(text, path)
            fresh, key = change(text, keys)
            if fresh != text:
                _require_keys(fresh, {**keys, key.hash: key}, path)
                _replace(path, fresh)
            return key
    except ConfigError as error:
        raise CliError(str(error), USAGE_STATUS) from error
    except UnicodeDecodeError as error:
        raise CliError(f"{path} is not UTF-8 text: save it as UTF-8.", USAGE_STATUS) from error
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}.", USAGE_STATUS) from error


def _require_keys(text: str, keys: Keys, path: Path) -> None:
    """Raise `CliError` unless the text holds exactly these keys."""
    try:
        is_right = read_keys(text, path) == keys
    except ConfigError:
        is_right = False
    if not is_right:
        raise CliError(
            f"{path} has a form that this command cannot edit: write its keys as a list with "
            "dashes below `keys:`.",
            USAGE_STATUS,
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(text.encode())
            out.flush()
            if path.exists():
                _keep_owner(out.fileno(), path.stat())
            os.fsync(out.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _keep_owner(handle: int, old: os.stat_result) -> None:
    """Give a new file the owner of the old one, so that a gateway of another user can read it.

    Of the mode only the group's right to read is taken over, and only if the group is not the
    writer's own: somebody gave it on purpose.
    """
    if (old.st_uid, old.st_gid) == (os.geteuid(), os.getegid()):
        return
    os.fchown(handle, old.st_uid, old.st_gid)
    os.fchmod(handle, FILE_MODE | (old.st_mode & stat.S_IRGRP))
