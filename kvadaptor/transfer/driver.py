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


VERSIONS = {"cuMemcpy3DBatchAsync": 12080}
"""The CUDA version whose signature is meant, for calls that have several."""


@functools.cache
def _versioned(name: str) -> Any:
    """Return the entry point that the driver gives for a name and a version."""
    found, status, version = ctypes.c_void_p(), ctypes.c_int(), VERSIONS[name]
    where = ctypes.byref(found), ctypes.c_int(version), ctypes.c_uint64(0), ctypes.byref(status)
    _driver().cuGetProcAddress_v2(name.encode(), *where)
    if not found.value:
        needed = f"{version // 1000}.{version % 1000 // 10}"
        raise DriverError(f"the CUDA driver has no {name}: install one for CUDA {needed}.")
    # C's calling convention passes more arguments than are declared.
    return ctypes.CFUNCTYPE(ctypes.c_int)(found.value)


def call_driver(name: str, *arguments: Any) -> str | None:
    """Call the driver, without Python's lock; return the name of the error, None for success.

    Raises `DriverError` if there is none, or one without this call.
    """
    driver = _driver()
    try:
        entry = _versioned(name) if name in VERSIONS else getattr(driver, name)
    except AttributeError as error:
        raise DriverError(f"the CUDA driver has no {name}: install a newer one.") from error
    status: int = entry(*arguments)
    if status == 0:
        return None
    text = ctypes.c_char_p()
    driver.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
    return text.value.decode() if text.value else f"error {status}"
