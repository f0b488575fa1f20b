"""The `aileron` command: one module per command, imported only when it is used.

It starts fast because nothing here imports torch or vLLM, nor anything that a command does not
need. Errors that users cause are `CliError`s: one sentence on stderr and a non-zero exit status.
"""

import sys

from coordinator.cli.arguments import parse_arguments
from coordinator.cli.errors import CliError


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
        status: int = options.command(options)
    except CliError as error:
        print(f"aileron: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output, such as `head`, has closed the pipe, as it may.
        sys.stderr.close()
        return 0
    return status
