"""`python -m worker` on CPU whose ranks copy KV to and from host pages as CUDA ranks do.

Stores go beside steps, and every load goes ahead of its task's first step. A thread copies, and
takes its time, so that tasks end, are preempted and migrate meanwhile.
"""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from worker.__main__ import FIXED_ENVIRONMENT, VLLM_ENVIRONMENT, main

# As `main` does before it imports vLLM.
os.environ.update({**VLLM_ENVIRONMENT, **os.environ, **FIXED_ENVIRONMENT})

from kvadaptor.host.page_copies import PageCopier, PageCopies
from worker.engine import host_kv

SHARE_S = 0.0003
"""How long the copy of a share takes."""


class SlowCopying:
    """Copies of a thread."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def is_over(self) -> bool:
        """Return whether the thread has made them."""
        return self.over.is_set()

    def order(self) -> None:
        """Wait until it has."""
        self.over.wait()


class SlowCopier:
    """A copier whose copies are made by a thread, in order."""

    def __init__(self, copier: PageCopier) -> None:
        self._copier, self._thread = copier, ThreadPoolExecutor(1)

    def launch(self, copies: PageCopies, *, waits: bool = True) -> SlowCopying:
        """Let the thread copy."""
        copying = SlowCopying()
        self._thread.submit(self._copy, copies, copying)
        return copying

    def _copy(self, copies: PageCopies, copying: SlowCopying) -> None:
        for number in range(len(copies.pages)):
            time.sleep(SHARE_S)
            self._copier.launch(copies.part(number, number + 1))
        copying.over.set()


def install() -> None:
    """Change every rank that is started from this process."""
    module: Any = host_kv
    copier_of = module._copier
    module.copies_aside = lambda device: True
    module.STEP_LOAD_US = 0
    module._copier = lambda *given, **named: SlowCopier(copier_of(*given, **named))


if __name__ == "__main__":
    install()
    sys.exit(main())
