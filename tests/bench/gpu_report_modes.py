"""One table of all modes that a GPU benchmark has measured."""

from statistics import fmean

from tests.bench.gpu_numbers import Results, find, loads, sizes

OURS = ("shift", "sp", "pp", "tp", "dp")
THEIRS = ("tp", "pp", "dp")


def is_measured(results: Results, *modes: str) -> bool:
    """Whether this run has anything of one of aileron's modes."""
    ranks = results["ranks"]
    return any(f"aileron {mode}{ranks}" in results["servers"] for mode in modes)


def value(results: Results, server: str, kind: str, size: str) -> float | None:
    """Return the median of a size in ms, or tokens/s where the kind is `saturated`.

    A step of a pipeline group has a share of the streams, so that a stream waits for several.
    """
    name = "tokens_per_s" if kind == "saturated" else "median_ms"
    found = find(results, "servers", server, kind, size, name)
    if found is None:
        return None
    streams = find(results, "servers", server, kind, size, "streams")
    if kind == "tpot" and streams and server.rsplit(maxsplit=1)[-1].startswith("pp"):
        return float(found) * int(size) / fmean(streams)
    return float(found)


def table(results: Results) -> list[str]:
    """Every size in every mode that was measured."""
    ranks = results["ranks"]
    names = [f"aileron {mode}{ranks}" for mode in OURS]
    names += [f"static {mode}{ranks}" for mode in THEIRS]
    names = [name for name in names if name in results["servers"]]
    lines = ["", "### All modes", "", "| | " + " | ".join(names) + " |"]
    lines += ["|---" * (len(names) + 1) + "|"]
    rows = [("ttft", size, f"TTFT of {int(size):,} tokens, ms") for size in sizes(results, "ttft")]
    rows += [("tpot", size, f"TPOT, {size} streams, ms") for size in sizes(results, "tpot")]
    rows += [
        ("saturated", size, f"{size if size != 'all' else 'saturated'}, output tokens/s")
        for size in sorted(loads(results))
    ]
    for kind, size, label in rows:
        values = [value(results, name, kind, size) for name in names]
        cells = ["–" if one is None else f"{one:,.2f}" for one in values]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return lines
