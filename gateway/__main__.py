"""`python -m gateway --config FILE`: one gateway process."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import structlog

from coordinator.protocol.cell_tls import cell_tls_of
from coordinator.protocol.certificate import CertificateError, certificate_of
from coordinator.protocol.config import Config, ConfigError, load_config, shared_token
from coordinator.protocol.config_file import ConfigFile
from coordinator.protocol.failure_reason import reason_of
from coordinator.protocol.folders import require_gateway_folders
from coordinator.protocol.log_options import add_log_options, with_log_options
from coordinator.protocol.model_check import check_model
from coordinator.protocol.model_files import ask_nobody
from coordinator.protocol.sized_goals import with_sized_goals
from gateway.environment import API_KEY, dropped_names, settle
from gateway.telemetry.logs import set_up_logging

log = structlog.get_logger(__name__)


def main() -> int:
    """Parse arguments, check the configuration, serve; 2 if the user must change something."""
    parser = argparse.ArgumentParser(prog="python -m gateway", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE")
    add_log_options(parser)
    options = parser.parse_args()

    def read(path: Path) -> Config:
        return with_sized_goals(with_log_options(load_config(path), options))

    try:
        config = read(options.config)
        file = ConfigFile(options.config, config, read, "gateway")
        token = shared_token()
        certificate_of("gateway", config.gateway.tls_cert_file, config.gateway.tls_key_file)
        cell_tls_of(config.cell_tls)
        check_model(config, weights=False, fetch=ask_nobody)
        require_gateway_folders(config)
    except (ConfigError, CertificateError) as error:
        return refuse(error)
    set_up_logging(config.log)
    warn_of_dropped(dropped_names(os.environ))
    settle(os.environ)
    # Importing vLLM takes seconds, so all cheap checks come before it.
    from gateway.process import serve

    try:
        return serve(file, token)
    except (OSError, ValueError) as error:
        return refuse(error)
    except Exception as error:  # noqa: BLE001 -- the last line must be a reason, whatever it is
        traceback.print_exc()
        refuse(error)
        return 1


def warn_of_dropped(names: Sequence[str]) -> None:
    """Warn of variables without an effect; values may be secrets, so only names are logged."""
    if API_KEY in names:
        log.warning(
            "api_key_dropped",
            reason=f"{API_KEY} does not protect this server: start it with --keys FILE, which "
            "sets gateway.keys_file (see `aileron key --help`).",
        )
    if others := [name for name in names if name != API_KEY]:
        log.warning(
            "variables_dropped",
            names=others,
            reason="A gateway does not pass these variables on to vLLM: use options instead.",
        )


def refuse(error: Exception) -> int:
    """Print in one line what is wrong; return 2."""
    print(f"gateway: {reason_of(error)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed; unloading torch's modules would only print warnings about its leaks.
    os._exit(status)
