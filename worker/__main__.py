"""`python -m worker --config FILE`: all ranks of a cell on this host; `doctor` only builds them."""

import argparse
import os
import sys
import traceback
from pathlib import Path

from coordinator.protocol.cell_tls import cell_tls_of
from coordinator.protocol.certificate import CertificateError
from coordinator.protocol.config import ConfigError, load_config, shared_token
from coordinator.protocol.failure_reason import reason_of
from coordinator.protocol.host_memory import check_host_kv
from coordinator.protocol.log_options import add_log_options, with_log_options
from coordinator.protocol.logs import set_up_logging
from coordinator.protocol.model_check import check_model
from coordinator.protocol.model_files import ask_nobody
from coordinator.protocol.nccl import check_nccl
from coordinator.protocol.sized_goals import with_sized_goals

VLLM_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    # vLLM's log lines go through our logging, to one place in one form.
    "VLLM_CONFIGURE_LOGGING": "0",
    "TOKENIZERS_PARALLELISM": "false",
    # FlashInfer compiles its sampler at the first top-p, with nvcc, which the image lacks.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""Set before vLLM is imported, unless the user has set them."""

FIXED_ENVIRONMENT = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "0"}
"""Set even if the user has set them: otherwise vLLM could unpickle what peers and clients send."""


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="aileron rank", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["serve", "doctor"], default="serve")
    parser.add_argument("--config", type=Path, required=True, help="the cell's YAML file")
    add_log_options(parser)
    args = parser.parse_args()
    for name, value in VLLM_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.update(FIXED_ENVIRONMENT)
    try:
        config = with_sized_goals(with_log_options(load_config(args.config), args))
        if args.command == "serve":
            shared_token()
            cell_tls_of(config.cell_tls)
        set_up_logging(config.log)
        check_model(config, fetch=ask_nobody)
        check_nccl(config)
        check_host_kv(config)
        # Imported late: the checks above take milliseconds, vLLM's import takes seconds.
        from worker.engine.config import EngineConfigError
        from worker.launch.launcher import Launcher, probe

        try:
            return probe(config) if args.command == "doctor" else Launcher(config).run()
        except EngineConfigError as error:
            raise ConfigError(str(error)) from error
    except (ConfigError, CertificateError) as error:
        print(f"aileron: {error}", file=sys.stderr)
        return 2
    except Exception as error:  # noqa: BLE001 -- the last line must be a reason, whatever it is
        if not isinstance(error, ValueError):
            traceback.print_exc()
        print(f"aileron: {reason_of(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Unloading torch's modules would print warnings about its leaks after the reason.
    os._exit(status)
