"""A gateway whose patience is what the environment says: `tests.harness.cells.hasty_gateway`.

Each name in `PATIENCE` is a variable of the environment, in seconds. Everything else is the
product's.
"""

import importlib
import os
import runpy
from collections.abc import Mapping

DRAIN_ENV = "AILERON_TEST_DRAIN_S"
"""How long streams may go on once it is told to end."""
STALL_ENV = "AILERON_TEST_STALL_S"
"""How long a client may stop reading."""
KEEP_ALIVE_ENV = "AILERON_TEST_KEEP_ALIVE_S"
"""Pause in a stream after which it says that it lives."""
HEADER_ENV = "AILERON_TEST_HEADER_S"
"""How long a request's headers may take."""
BODY_ENV = "AILERON_TEST_BODY_S"
"""How long a body may take that is slower than bearable."""
COMPILE_ENV = "AILERON_TEST_COMPILE_S"
"""How long a grammar may take to compile."""
TICK_ENV = "AILERON_TEST_TICK_S"
"""A quarter of the time after which it tells cells again what it has measured."""

PATIENCE = {
    DRAIN_ENV: ("gateway.process", "DRAIN_S"),
    STALL_ENV: ("gateway.http.answer", "SEND_STALL_S"),
    KEEP_ALIVE_ENV: ("gateway.http.answer", "KEEP_ALIVE_S"),
    HEADER_ENV: ("gateway.http.connection", "HEADER_WAIT_S"),
    BODY_ENV: ("gateway.http.intake", "BODY_GRACE_S"),
    COMPILE_ENV: ("gateway.engine.grammar", "COMPILE_S"),
    TICK_ENV: ("gateway.process", "TICK_S"),
}
"""The module of the product and the constant that each of them sets."""

HASTY_S = {STALL_ENV: 2.0, KEEP_ALIVE_ENV: 1.0, HEADER_ENV: 3.0, BODY_ENV: 3.0, COMPILE_ENV: 1.0}
"""The patience of the one that tests share."""
OFTEN_S = {TICK_ENV: 0.05}
"""The patience of one whose measures a test waits for."""


def patience(waits_s: Mapping[str, float]) -> dict[str, str]:
    """The environment of a gateway that waits so long."""
    return {name: str(wait_s) for name, wait_s in waits_s.items()}


def main() -> None:
    """Run the gateway."""
    for name, (module, constant) in PATIENCE.items():
        if name in os.environ:
            found = importlib.import_module(module)
            assert hasattr(found, constant)
            setattr(found, constant, float(os.environ[name]))
    runpy.run_module("gateway", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
