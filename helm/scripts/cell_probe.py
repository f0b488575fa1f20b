# ruff: noqa: INP001
"""Probe of a cell's ranks, run in their container: `ready` or `live`; the exit status answers.

ready: the coordinator has ranks that can serve, as it has through every switch.
live: fails only if the coordinator answers and has none; ranks serve while it is away.
"""

import json
import os
import ssl
import sys
import urllib.request

URL = os.environ.get("AILERON_ADMIN_URL", "http://127.0.0.1:8001")
LIMIT_S = 5.0


def ranks_available() -> int:
    """Return the number of ranks that can serve; raises OSError or ValueError without an answer."""
    # Two keys are valid while they rotate.
    keys = os.environ.get("AILERON_ADMIN_KEY", "").split()
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    request = urllib.request.Request(f"{URL}/admin/ranks", headers=headers)  # noqa: S310
    # The coordinator is in this pod, and its certificate names the Service.
    unverified = ssl._create_unverified_context()  # noqa: S323, SLF001
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unverified)
    )
    with opener.open(request, timeout=LIMIT_S) as response:
        return sum(1 for rank in json.load(response)["ranks"] if rank.get("available"))


def main(question: str) -> int:
    """Print the problem; return 0 if the answer is yes."""
    try:
        available = ranks_available()
    except (OSError, ValueError, KeyError) as error:
        print(f"the coordinator does not answer: {error}")
        return 0 if question == "live" else 1
    if not available:
        print("no rank can serve")
    return 0 if available else 1


if __name__ == "__main__":
    if sys.argv[1:] not in (["ready"], ["live"]):
        sys.exit("usage: cell_probe.py ready|live")
    sys.exit(main(sys.argv[1]))
