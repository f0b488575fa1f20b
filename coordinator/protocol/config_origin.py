"""What became of the user's file from which `aileron up` makes the file that its processes read.

`aileron up` writes it beside the processes' file, and the coordinator reads it: an operator who
asks the coordinator for a reload means the user's file. Touches the disk.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from coordinator.protocol.file_stamp import Stamp, stamp_of

ENDING = ".origin.json"


@dataclass(frozen=True, slots=True)
class ConfigOrigin:
    """The user's file, as it was when it was last read."""

    file: str
    stamp: Stamp | None
    refusal: str = ""
    """Why it could not be used; empty if the processes' file follows from it."""

    @property
    def is_read(self) -> bool:
        """Whether the file has not changed since."""
        return self.stamp == stamp_of(Path(self.file))


def write_origin(config_file: Path, origin: ConfigOrigin) -> None:
    """Replace the record beside a processes' file; raises OSError."""
    path = _path_of(config_file)
    fresh = path.with_suffix(".new")
    text = json.dumps({"file": origin.file, "stamp": origin.stamp, "refusal": origin.refusal})
    fresh.write_text(text)
    fresh.replace(path)


def remove_origin(config_file: Path) -> None:
    """Forget the record of an earlier run."""
    _path_of(config_file).unlink(missing_ok=True)


def read_origin(config_file: Path) -> ConfigOrigin | None:
    """Return the record; None where nobody follows a file of the user."""
    try:
        fields = json.loads(_path_of(config_file).read_text())
        stamp = fields["stamp"]
        read = None if stamp is None else tuple((int(a), int(b), int(c)) for a, b, c in stamp)
        return ConfigOrigin(str(fields["file"]), read, str(fields["refusal"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _path_of(config_file: Path) -> Path:
    return config_file.with_name(config_file.name + ENDING)
