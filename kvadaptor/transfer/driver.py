"""Calls of the CUDA driver that torch does not offer."""

import ctypes
import functools
from typing import Any


class DriverError(RuntimeError):
    """The CUDA driver's library cannot be loaded; the message is one sentence."""


@functools.cache
def _driver() -> Any:
    """Return the driver's library, which torch has loaded already."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"the CUDA driver's library cannot be loaded: {error}.") from error


def call_driver(name: str, *arguments: Any) -> str | None:
    """Call the driver, without Python's lock; return the name of the error, None for success."""
    driver = _driver()
    status: int = getattr(driver, name)(*arguments)
    if status == 0:
        return None
    text = ctypes.c_char_p()
    driver.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
    return text.value.decode() if text.value else f"error {status}"
