"""Values that YAML 1.1 reads as true and false, though they are words of the configuration."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator


def _word(value: Any) -> Any:
    """Return the word that a truth value of YAML stands for: `on` and `off` without quotes."""
    return ("off", "on")[value] if isinstance(value, bool) else value


OnOff = Annotated[Literal["on", "off"], BeforeValidator(_word)]
AutoOff = Annotated[Literal["auto", "off"], BeforeValidator(_word)]
