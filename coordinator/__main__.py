"""`python -m coordinator --config FILE`: one coordinator process."""

import argparse
import asyncio
import sys
from pathlib import Path

from coordinator.admin.key import AdminKeyError
from coordinator.process import admin_keys, serve
from coordinator.protocol.cell_tls import cell_tls_of
from coordinator.protocol.certificate import CertificateError, certificate_of
from coordinator.protocol.config import Config, ConfigError, load_config, shared_token
from coordinator.protocol.config_file import ConfigFile
from coordinator.protocol.folders import require_policy_files
from coordinator.protocol.log_options import add_log_options, with_log_options
from coordinator.protocol.logs import set_up_logging
from coordinator.protocol.sized_goals import with_sized_goals
from coordinator.server.server import ListenError

USAGE_STATUS = 2
"""Exit status where the user must change something first."""


def main() -> int:
    """Parse arguments, check the configuration, serve until a signal."""
    parser = argparse.ArgumentParser(prog="python -m coordinator", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE")
    add_log_options(parser)
    options = parser.parse_args()

    def read(path: Path) -> Config:
        return with_sized_goals(with_log_options(load_config(path), options))

    try:
        config = read(options.config)
        token = shared_token()
        cell_tls_of(config.cell_tls)
        certificate_of("admin", config.admin.tls_cert_file, config.admin.tls_key_file)
        keys = admin_keys(config.admin.host)
        require_policy_files(config)
    except (ConfigError, AdminKeyError) as error:
        print(f"coordinator: {error}", file=sys.stderr)
        return USAGE_STATUS
    set_up_logging(config.log)
    try:
        asyncio.run(serve(ConfigFile(options.config, config, read, "coordinator"), token, keys))
    except (ConfigError, CertificateError) as error:
        print(f"coordinator: {error}", file=sys.stderr)
        return USAGE_STATUS
    except ListenError as error:
        print(f"coordinator: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
