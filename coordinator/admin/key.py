"""The keys of the admin port, by role, and the check that an address may open with them.

A role has a variable with its keys and one with the name of a file of them. Several keys are
separated by blanks or line breaks, and all are valid: the old one and the new one while they
rotate. A file is read again when it changes, so rotation needs no restart.
"""

import hmac
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path

import structlog

from coordinator.protocol.addresses import is_loopback
from coordinator.protocol.file_stamp import Stamp, stamp_of

ADMIN_KEY_ENV = "AILERON_ADMIN_KEY"
VIEWER_KEY_ENV = "AILERON_VIEWER_KEY"
METRICS_KEY_ENV = "AILERON_METRICS_KEY"
FILE_ENDING = "_FILE"
ADMIN_KEY_CHARS_MIN = 16

log = structlog.get_logger()


class Role(IntEnum):
    """What the holder of a key may do; a higher role may do all that a lower one may."""

    METRICS = 1
    """Read /metrics and nothing else."""
    VIEWER = 2
    """Read everything."""
    OPERATOR = 3
    """Switch layouts, return modes to service, renew ranks."""

    @property
    def variable(self) -> str:
        """The environment variable of the role's keys."""
        return _VARIABLES[self]


_VARIABLES = {
    Role.METRICS: METRICS_KEY_ENV,
    Role.VIEWER: VIEWER_KEY_ENV,
    Role.OPERATOR: ADMIN_KEY_ENV,
}
KEY_VARIABLES = tuple(name + ending for name in _VARIABLES.values() for ending in ("", FILE_ENDING))
"""All variables that hold or name admin keys."""


class AdminKeyError(ValueError):
    """The admin port must not open like this; the message is one sentence that says what to do."""


class AdminKeys:
    """The keys of all roles; without any the port is open, which only loopback allows."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Read variables and files; raises `AdminKeyError`."""
        self._fixed = {role: environment.get(role.variable, "") for role in Role}
        self._files = {
            role: _KeyFile(role.variable + FILE_ENDING, Path(path))
            for role in Role
            if (path := environment.get(role.variable + FILE_ENDING, ""))
        }
        self._roles: dict[bytes, Role] = {}
        for role in self._files:
            self._files[role].read()
        self._roles = self._collect()

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return not self._roles

    def variables_for(self, needed: Role) -> tuple[str, ...]:
        """Return the variables whose keys suffice for a role here, the lowest role first."""
        present = set(self._roles.values())
        return tuple(role.variable for role in Role if role >= needed and role in present)

    def require(self, host: str) -> None:
        """Raise `AdminKeyError` unless an admin port on `host` may open with these keys."""
        if Role.OPERATOR in self._roles.values():
            return
        if self._roles:
            raise AdminKeyError(
                f"{ADMIN_KEY_ENV} is not set, but another admin key is: set it as well, or nobody "
                "could switch layouts."
            )
        if not is_loopback(host):
            raise AdminKeyError(
                f"admin.host {host} can be reached from other machines: set {ADMIN_KEY_ENV} to a "
                f"secret of at least {ADMIN_KEY_CHARS_MIN} characters, or bind to 127.0.0.1."
            )

    def role_of(self, sent: bytes) -> Role | None:
        """Return the role of a key, in a time that does not depend on it."""
        self._refresh()
        found: Role | None = None
        for key, role in self._roles.items():
            if hmac.compare_digest(key, sent):
                found = role
        return found

    def _refresh(self) -> None:
        """Read changed files again; keys of a file that cannot be used stay as they were."""
        changed = [file for file in self._files.values() if file.is_changed()]
        for file in changed:
            old = file.text
            try:
                file.read()
                self._roles = self._collect()
            except AdminKeyError as error:
                file.text = old
                log.warning("admin_keys_not_read", reason=str(error))
            else:
                log.info("admin_keys_read", keys=len(self._roles))

    def _collect(self) -> dict[bytes, Role]:
        roles: dict[bytes, Role] = {}
        for role in Role:
            file = self._files.get(role)
            words = (*self._fixed[role].split(), *(file.text.split() if file else ()))
            for word in words:
                if len(word) < ADMIN_KEY_CHARS_MIN:
                    raise AdminKeyError(
                        f"{role.variable} must have at least {ADMIN_KEY_CHARS_MIN} characters."
                    )
                if roles.setdefault(word.encode(), role) is not role:
                    other = roles[word.encode()].variable
                    raise AdminKeyError(
                        f"{other} and {role.variable} hold the same key: use one for each role."
                    )
            if file is not None and not file.text.split():
                raise AdminKeyError(
                    f"{file.variable}: {file.path} holds no key: write one into it."
                )
        return roles


class _KeyFile:
    """A file of keys, and what it held when it was last read."""

    def __init__(self, variable: str, path: Path) -> None:
        self.variable = variable
        self.path = path
        self.text = ""
        self._stamp: Stamp | None = None

    def is_changed(self) -> bool:
        """Return whether the file is there and another one than the one last read."""
        stamp = stamp_of(self.path)
        return stamp is not None and stamp != self._stamp

    def read(self) -> None:
        self._stamp = stamp_of(self.path)
        try:
            self.text = self.path.read_text(encoding="utf-8-sig")
        except OSError as error:
            text = f"{self.variable}: cannot read {self.path}: {error.strerror}."
            raise AdminKeyError(text) from error
        except UnicodeDecodeError as error:
            raise AdminKeyError(f"{self.variable}: {self.path} is not UTF-8 text.") from error
