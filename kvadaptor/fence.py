"""Orders memory that processes share without locks."""

import threading

FENCE = threading.Lock()
"""Taking a lock orders memory, which a store and a later load of another word need."""
