"""Refuses folders and files of the configuration that a process could not write into.

Called at start, where a sentence helps more than a failure of the first request. Touches the disk.
"""

import tempfile
from pathlib import Path

from coordinator.protocol.config import Config, ConfigError

SOCKET_PATH_BYTES = len("/gateway-abcdefgh/engine-out.sock")
"""What a gateway appends to `run_dir` for its longest socket."""
UNIX_PATH_BYTES_MAX = 107
"""Longest path of a Unix socket."""
LOG_NAMES = ("gateway.log", "worker.log", "coordinator.log", "config.yaml")
"""Files of a run's folder that `aileron up` writes."""


def require_folder(setting: str, folder: Path) -> None:
    """Make a folder for this user alone, and write into it; raises `ConfigError` if that fails."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"1")
            file.flush()
    except FileExistsError as error:
        raise ConfigError(f"{setting} {folder} is a file: name a folder.") from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting} {folder} cannot be written ({words_of(error)}): name a folder that this "
            "user may write into, on a disk with room."
        ) from error


def require_appendable(setting: str, path: Path) -> None:
    """Open a file for more text, which may create it; raises `ConfigError` if that fails."""
    try:
        with path.open("ab"):
            pass
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting} {path} cannot be written ({words_of(error)}): name a file in a folder that "
            "exists and that this user may write into."
        ) from error


def require_run_folder(folder: Path) -> None:
    """Refuse a `run_dir` that cannot hold a run's logs and sockets; raises `ConfigError`."""
    require_folder("run_dir", folder)
    room = UNIX_PATH_BYTES_MAX - SOCKET_PATH_BYTES
    if len(str(folder).encode("utf-8", "surrogateescape")) > room:
        raise ConfigError(
            f"run_dir {folder} is longer than {room} bytes, too long for its Unix sockets: name a "
            "shorter one."
        )
    for name in LOG_NAMES:
        if (folder / name).exists():
            require_appendable("run_dir:", folder / name)


def require_gateway_folders(config: Config) -> None:
    """Refuse folders that a gateway could not use; raises `ConfigError`."""
    if config.run_dir:
        require_run_folder(Path(config.run_dir))
    if config.batches.data_dir:
        require_folder("batches.data_dir", Path(config.batches.data_dir))


def require_policy_files(config: Config) -> None:
    """Refuse a log of observations that cannot be written; raises `ConfigError`."""
    if config.policy.observation_log:
        require_appendable("policy.observation_log", Path(config.policy.observation_log))


def words_of(error: OSError | ValueError) -> str:
    """Return the system's words for an error, such as No space left on device."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
