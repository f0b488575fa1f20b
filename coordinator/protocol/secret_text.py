"""Settings that hold secrets, such as a Redis URL with a password, and the ways to refer to one.

A value may name environment variables (`${AILERON_REDIS_URL}`), or a file beside it holds the
whole value. A resolved value remembers its reference, which is written wherever the configuration
is dumped: no secret gets from the environment into a file or onto a screen.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, PlainSerializer

HIDDEN = "***"
"""Stands for a secret that is not visible."""

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_PASSWORD = re.compile(r"(://[^:@/?]*:)(?!\$\{\w+\}@).*@")
_SECRET_PARAMETER = re.compile(
    r"([?&][^=&#]*(?:password|passwd|secret|token|key)[^=&#]*)=(?!\$\{)[^&#]*", re.IGNORECASE
)


class SecretText(str):
    """A resolved value; `reference` is what stands in the configuration."""

    __slots__ = ("reference",)
    reference: str

    def __new__(cls, text: str, reference: str = "") -> Self:
        """Return `text`, written as `reference`."""
        made = super().__new__(cls, text)
        made.reference = reference
        return made


def resolve(value: str) -> str:
    """Replace `${NAME}` by the environment's value; raises ValueError if it has none."""
    if "${" not in value:
        return value
    if "${" in _REFERENCE.sub("", value):
        raise ValueError("must name variables as ${NAME}, in letters, digits and underscores.")
    for name in _REFERENCE.findall(value):
        if not os.environ.get(name):
            raise ValueError(
                f"must name variables that are set, and {name} is not: set it in the environment "
                "of every process."
            )
    return SecretText(_REFERENCE.sub(lambda found: os.environ[found[1]], value), value)


def reference_of(value: str) -> str:
    """Return what stands in the configuration for a value."""
    return value.reference if isinstance(value, SecretText) else value


SecretSetting = Annotated[
    str, AfterValidator(resolve), PlainSerializer(reference_of, return_type=str)
]
"""A setting that may refer to the environment."""


def read_secret_file(section: BaseModel, prefix: str, name: str) -> None:
    """Set a setting from the file that `<name>_file` names, if any; raises ValueError."""
    path = getattr(section, f"{name}_file")
    if not path:
        return
    default = type(section).model_fields[name].default
    if getattr(section, name) != default:
        raise ValueError(
            f"{prefix}.{name} and {prefix}.{name}_file exclude each other: set one of them."
        )
    try:
        text = Path(path).read_text(encoding="utf-8-sig").strip()
    except OSError as error:
        raise ValueError(f"{prefix}.{name}_file: cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{prefix}.{name}_file: {path} is not UTF-8 text.") from error
    if not text:
        raise ValueError(f"{prefix}.{name}_file: {path} is empty: write the value into it.")
    # Models are frozen for everyone else.
    object.__setattr__(section, name, SecretText(resolve(text), default))


def without_secrets(value: Any) -> Any:
    """Return settings with every password in a URL, and secret engine option, hidden."""
    if isinstance(value, dict):
        return {name: without_secrets(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return _hide_after_options([without_secrets(each) for each in value])
    return _hide_in_url(value) if isinstance(value, str) and "://" in value else value


def _hide_in_url(text: str) -> str:
    text = _PASSWORD.sub(rf"\1{HIDDEN}@", text)
    return _SECRET_PARAMETER.sub(rf"\1={HIDDEN}", text)


def _hide_after_options(words: list[Any]) -> list[Any]:
    """Hide the values of options such as --hf-token, in one word or two."""
    visible: list[Any] = []
    for number, word in enumerate(words):
        before = words[number - 1] if number else ""
        if _is_secret_option(before) and "=" not in before:
            visible.append(HIDDEN)
        elif _is_secret_option(word) and "=" in word:
            visible.append(f"{word.partition('=')[0]}={HIDDEN}")
        else:
            visible.append(word)
    return visible


def _is_secret_option(word: Any) -> bool:
    if not isinstance(word, str) or not word.startswith("--"):
        return False
    return bool(re.search(r"(token|password|secret|api-key)$", word.partition("=")[0]))
