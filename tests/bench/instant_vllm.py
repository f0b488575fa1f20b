"""vLLM's own API server over an engine that computes nothing.

`python -m tests.bench.instant_vllm FOLDER OPTIONS…` is `vllm serve OPTIONS…` with vLLM's parts
unchanged, except that no engine core starts: `tests.bench.instant_engine` stands for it, at sockets
in FOLDER.
"""

import subprocess
import sys
from typing import Any

import uvloop


async def serve(folder: str, options: list[str]) -> None:
    """Serve until a signal."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.launchers.launcher import setup_server
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    from gateway.engine.wire import ready_frame

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    args: Any = parser.parse_args(options)
    validate_parsed_serve_args(args)
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    addresses = [f"ipc://{folder}/engine-{way}.sock" for way in ("in", "out")]
    command = [sys.executable, "-m", "tests.bench.instant_engine", "vllm", *addresses]
    engine = subprocess.Popen([*command, ready_frame(config).hex()])
    try:
        llm = AsyncLLM.from_vllm_config(
            config,
            enable_log_requests=args.enable_log_requests,
            disable_log_stats=args.disable_log_stats,
            client_addresses=dict(zip(("input_address", "output_address"), addresses, strict=True)),
        )
        address, sock = setup_server(args, reuse_port=False)
        await (await build_and_serve(llm, address, sock, args))
    finally:
        engine.kill()
        engine.wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], sys.argv[2:]))
