"""The policy's files: step times, read at start, and the observation log."""

from pathlib import Path

import structlog
import yaml

from coordinator.model.observation_log import Line, encode
from coordinator.model.step_line import StepLine
from coordinator.policy.step_file import parse_step_times
from coordinator.protocol.config import ConfigError

log = structlog.get_logger()


def read_step_times(path: str) -> dict[str, StepLine]:
    """Read a file of step times; an empty path gives none. Raises `ConfigError`."""
    if not path:
        return {}
    try:
        return parse_step_times(yaml.safe_load(Path(path).read_bytes()))
    except OSError as error:
        raise ConfigError(f"policy.step_times: cannot read {path}: {error.strerror}.") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"policy.step_times: {path}: {error}") from error


class ObservationLog:
    """Appends lines to a file; at `bytes_max` it moves the file to `<file>.1` and starts a new one.

    A log that cannot be written ends with a warning, because nothing depends on it.
    """

    def __init__(self, path: str, bytes_max: int) -> None:
        self._path = Path(path)
        self._bytes_max = bytes_max
        self._is_broken = not path

    def write(self, line: Line) -> None:
        """Append a line."""
        if self._is_broken:
            return
        try:
            with self._path.open("ab") as file:
                file.write(encode(line) + b"\n")
                size = file.tell()
            if size >= self._bytes_max:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
        except OSError as error:
            self._is_broken = True
            log.warning("observation_log_ended", file=str(self._path), reason=error.strerror)
