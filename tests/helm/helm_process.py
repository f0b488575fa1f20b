"""`python -m tests.helm.helm_process`: Helm itself, asked in a process of its own.

Helm is a Go library with threads and limits of its own, which the tests' process is better without.
Reads a JSON list of jobs from stdin and writes the list of their answers to stdout.
"""

import json
import sys
from typing import Any

from helm_python import Chart, HelmError, lint


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Do one job: what was rendered and what lint says, or the error of it."""
    chart, values = job["chart"], job["values"]
    try:
        with Chart.load(chart) as loaded:
            loaded.validate_schema(values)
            rendered = loaded.render(values, name=job["name"], namespace=job["namespace"])
        report = lint(chart, values, strict=True, kube_version=job["kubernetes"])
    except HelmError as error:
        return {"error": str(error)}
    return {"rendered": rendered, "lint": [*report["messages"], *report["errors"]]}


if __name__ == "__main__":
    json.dump([answer(job) for job in json.load(sys.stdin)], sys.stdout)
