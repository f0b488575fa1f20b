"""Makes `python -m coordinator.cli` work as `aileron` where nothing is installed."""

import sys

from coordinator.cli import main

if __name__ == "__main__":
    sys.exit(main())
