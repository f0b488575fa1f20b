"""Sixteen faults put into the product on purpose: `python -m tests.mutants.faults [NAME...]`.

Each is one changed line in a copy of the checkout. Tests of `make test` must fail with it, and the
same tests must pass without it. The first tests named are the ones that should notice first.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900
"""How long the tests of one fault may take."""
SHORT = "not gpu and not chaos and not long and not fleet"


@dataclass(frozen=True)
class Fault:
    """A line of the product, what takes its place, and the tests that must notice."""

    file: str
    line: str
    instead: str
    tests: tuple[str, ...]


LOANS = ("tests/unit/comm_pool/test_loans.py", "tests/property/test_loans.py")

FAULTS = {
    "view's offset": Fault(
        "worker/engine/weights/layers.py",
        "return full.narrow(dim, rank % held * size, size)",
        "return full.narrow(dim, rank % held * (size - 1), size)",
        ("tests/integration/test_numerics.py",),
    ),
    "page's owner": Fault(
        "kvadaptor/pages.py",
        "self._place[pages] = _FREE",
        "self._place[pages[1:]] = _FREE",
        ("tests/unit/kvadaptor", "tests/property/test_pages.py"),
    ),
    "commit's order": Fault(
        "coordinator/switching/move_commits.py",
        "return next((epoch for epoch in reversed(self._committed) if epoch <= upto), 0)",
        "return next((epoch for epoch in self._committed if epoch <= upto), 0)",
        ("tests/unit/coordinator", "tests/simulation/test_switch.py"),
    ),
    "lease's end": Fault(
        "coordinator/protocol/switch_state.py",
        "return self.is_leader and self.serving and now_ms < self.lease_until",
        "return self.is_leader and self.serving",
        ("tests/unit/coordinator", "tests/simulation/test_switch.py"),
    ),
    "seed's draw": Fault(
        "worker/engine/runners/cpu.py",
        "z = (seed + (position + 1) * _MIX) & ((1 << 64) - 1)",
        "z = (seed + (position // 2 + 1) * _MIX) & ((1 << 64) - 1)",
        ("tests/unit/worker", "tests/contract"),
    ),
    "stream's order": Fault(
        "gateway/token_stream.py",
        "if span.first <= self.expected:\n                return index",
        "if span.first <= self.expected + 1:\n                return index",
        ("tests/unit/gateway/test_token_stream.py", "tests/property/test_token_stream.py"),
    ),
    "tier's clamp": Fault(
        "gateway/admission/tiers.py",
        "else max(wanted, self.highest)",
        "else min(wanted, self.highest)",
        ("tests/unit/gateway/test_tiers.py",),
    ),
    "limit": Fault(
        "gateway/http/edge.py",
        "if len(call.body) > self._limits.body_bytes_max:",
        "if len(call.body) > 2 * self._limits.body_bytes_max:",
        ("tests/unit/gateway",),
    ),
    "metric": Fault(
        "coordinator/telemetry/metrics_aggregator.py",
        "self.tally.add(measure, series.labels, series.value - value, grown)",
        "self.tally.add(measure, series.labels, series.value, grown)",
        ("tests/unit/coordinator/test_metrics_aggregator.py",),
    ),
    "loan's lender": Fault(
        "comm_pool/loans.py",
        "wished = holders[rank % len(holders)]",
        "wished = holders[0]",
        LOANS,
    ),
    "loan's lost lender": Fault(
        "comm_pool/loans.py",
        "return lenders[lost.index(wished) % len(lenders)]",
        "return lost[lost.index(wished) % len(lenders)]",
        LOANS,
    ),
    "loan's slot": Fault(
        "comm_pool/loans.py",
        "number - slots if number >= slots else None",
        "number - slots - 1 if number > slots else None",
        LOANS,
    ),
    "loan's part twice": Fault(
        "comm_pool/loans.py",
        "if layer not in whole for each in of_a_layer",
        "if layer not in whole for each in (*of_a_layer, *of_a_layer[:1])",
        LOANS,
    ),
    "loan's own part": Fault(
        "comm_pool/loans.py",
        "for part in _lacking(rank, ranks, parts)\n    ]",
        "for part in order_of(rank, ranks, parts)\n    ]",
        LOANS,
    ),
    "loan's whole layer": Fault(
        "comm_pool/loans.py",
        "for layer in range(layers) if layer not in whole for each",
        "for layer in range(layers) for each",
        LOANS,
    ),
    "chart value": Fault(
        "helm/templates/gateway.yaml",
        "{{ add $.Values.gateway.preStopSeconds 45 }}",
        "{{ add $.Values.gateway.preStopSeconds 15 }}",
        ("tests/helm",),
    ),
}


def main(names: list[str]) -> int:
    """Try these faults, or all; returns 1 if one goes unnoticed."""
    unnoticed = []
    for name in names or FAULTS:
        started = time.monotonic()
        first = failed_test(FAULTS[name])
        took_s = time.monotonic() - started
        print(f"{name}: {first or 'NOT NOTICED'} ({took_s:.0f} s)", flush=True)
        unnoticed += [] if first else [name]
    print(f"{len(unnoticed)} faults went unnoticed")
    return int(bool(unnoticed))


def failed_test(fault: Fault) -> str:
    """Return the first test that fails with the fault; empty if none does."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        copy = Path(folder, "checkout")
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".gpu")
        shutil.copytree(ROOT, copy, ignore=ignored)
        source = copy / fault.file
        text = source.read_text()
        assert text.count(fault.line) == 1, f"{fault.file} has no single line {fault.line!r}"
        source.write_text(text.replace(fault.line, fault.instead))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", SHORT, *fault.tests]
        env = {**os.environ, "PYTHONPATH": str(copy)}
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider"],
            cwd=copy,
            env=env,
            check=False,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-3000:]
    # A cell whose views are wrong refuses to start: then the test has an error, not a failure.
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0].split(" - ")[0].partition(" ")[2] if lines else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
