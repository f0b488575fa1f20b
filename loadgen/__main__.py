"""Entry point of `python -m loadgen`; everything is in `cli`."""

import sys

from loadgen.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
