"""`python -m gateway --config FILE`: one gateway process."""

import argparse
import os
import sys
from pathlib import Path

from coordinator.protocol.config import ConfigError, load_config, shared_token
from gateway.telemetry.logs import set_up_logging

VLLM_ENVIRONMENT = {
    # vLLM's log lines go through our logging.
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # An allowed media server must not redirect the fetch to one that is not allowed.
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
    # The front end computes nothing; torch's threads would take cores from ranks.
    "OMP_NUM_THREADS": "1",
}
FIXED_ENVIRONMENT = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "0"}
"""Overrides the user's value: otherwise vLLM would unpickle data from the token socket."""


def main() -> int:
    """Parse arguments, check the configuration, serve; 2 if the user must change something."""
    parser = argparse.ArgumentParser(prog="python -m gateway", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE")
    parser.add_argument("--log", choices=("json", "console"), default="json")
    options = parser.parse_args()
    try:
        config = load_config(options.config)
        token = shared_token()
    except ConfigError as error:
        return refuse(error)
    set_up_logging(json=options.log == "json")
    for name, value in VLLM_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.update(FIXED_ENVIRONMENT)
    # Importing vLLM takes seconds, so all cheap checks come before it.
    from gateway.process import serve

    try:
        return serve(config, token)
    except (OSError, ValueError) as error:
        return refuse(error)


def refuse(error: Exception) -> int:
    """Print in one line what is wrong; return 2."""
    print(f"gateway: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed; unloading torch's modules would only print warnings about its leaks.
    os._exit(status)
