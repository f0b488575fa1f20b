"""`python -m worker` with a further folder to import from: `IMPORT_FOLDER` names it.

vLLM looks at a model's class in a process of its own, which finds the folder by PYTHONPATH.
"""

import os
import sys

from worker.__main__ import main

FOLDER = "IMPORT_FOLDER"


def install() -> None:
    """Add the folder here and in child processes."""
    folder, others = os.environ[FOLDER], os.environ.get("PYTHONPATH", "")
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, others]))


if __name__ == "__main__":
    install()
    sys.exit(main())
