"""`aileron usage`: requests and tokens per tenant and tier, as a table or as JSON."""

import argparse
import json
from urllib.parse import urlencode

from coordinator.cli.admin_client import AdminClient
from coordinator.cli.last_run import find_admin_url
from coordinator.cli.tables import format_table

COLUMNS = (
    ("begin (UTC)", "begin"),
    ("tenant", "tenant"),
    ("tier", "tier"),
    ("requests", "requests"),
    ("prompt tokens", "prompt_tokens"),
    ("cached", "cached_tokens"),
    ("output tokens", "output_tokens"),
)
"""Header -> field of a row."""


def run_usage(options: argparse.Namespace) -> int:
    """Show the usage that the coordinator has counted since its start."""
    given = {"by": options.by, "last": options.last, "tenant": options.tenant}
    query = urlencode({name: value for name, value in given.items() if value is not None})
    client = AdminClient(find_admin_url(options.admin_url), options.admin_ca)
    answer = client.get(f"/admin/usage?{query}")
    if options.json:
        print(json.dumps(answer, indent=2))
        return 0
    rows = [[_short(str(row[field])) for _, field in COLUMNS] for row in answer["usage"]]
    if rows:
        print(format_table([header for header, _ in COLUMNS], rows))
    else:
        whose = f" of tenant {options.tenant}" if options.tenant is not None else ""
        print(f"no request{whose} has ended")
    print(f"counted since {_short(answer['since'])} (UTC), when the coordinator started")
    return 0


def _short(text: str) -> str:
    """Leave the offset out of a time, which is always UTC."""
    return text.removesuffix("+00:00")
