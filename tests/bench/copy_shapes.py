"""What a switch with `reshard` costs streams, by how the copy kernel's launches are cut up.

For GPU boxes: `python -m tests.bench.copy_shapes --ranks 2 --out DIR` runs one cell under streams
and switches it to and fro; each way of cutting up serves for two switches, then comes the next.
Writes a JSON file and prints a table. The ranks are `tests.bench.shaped_worker`.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.gpu_cell import running_cell
from tests.bench.gpu_numbers import spread
from tests.bench.gpu_shapes import (
    COMPILATION,
    as_arguments,
    engine_options,
    plan_for,
    write_shape,
)
from tests.bench.gpu_switches import SwitchRun
from tests.harness.runs.provenance import commit, today

SHAPES = "1024/1073741824/8,4096/16/32,4096/64/32,2048/132/16,4096/132/32"
COLUMNS = ("park_ms", "reshard_ms", "cut_over_ms", "stall_ms", "total_ms", "gap_p50", "gap_max")


async def measure(options: argparse.Namespace, model: Path, arguments: list[str]) -> Any:
    """Records of all switches, each with the pause that streams saw."""
    os.environ["PROFILE_OUT"] = str(options.out.absolute())
    os.environ["COPY_SHAPES"] = options.shapes
    plan = dataclasses.replace(plan_for(options.shape, quick=False), switches=options.switches)
    if options.streams:
        plan = dataclasses.replace(plan, streams=options.streams)
    up = running_cell(
        Path(tempfile.mkdtemp(prefix="cell-")),
        ranks=options.ranks,
        model=model,
        device=options.device,
        engine_args=arguments,
        worker="tests.bench.shaped_worker",
    )
    async with up as cell:
        print(f"started in {cell.start_s} s", flush=True)
        layouts = f"dp{options.ranks}", f"tp{options.ranks}"
        return await SwitchRun(cell, layouts, plan, "reshard").measure()


def by_shape(result: Any, shapes: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Shape and direction -> column -> its spread."""
    groups: dict[str, list[Any]] = {}
    for turn, record in enumerate(result["records"]):
        gaps = result["client_gaps_ms"].get(str(record["epoch"]), {})
        row = record | {f"gap_{name}": value for name, value in gaps.items()}
        groups.setdefault(f"{shapes[turn // 2 % len(shapes)]} {record['to']}", []).append(row)
    return {
        name: {
            column: spread(row[column] for row in rows if row.get(column) is not None)
            for column in COLUMNS
        }
        for name, rows in sorted(groups.items())
    }


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Median and worst of each column, in ms."""
    head = "| tile words/programs/warps, to | switches | " + " | ".join(COLUMNS) + " |"
    lines = [head, "|---" * (len(COLUMNS) + 2) + "|"]
    for name, columns in found.items():
        cells = [f"{each['p50']:.1f} / {each['max']:.1f}" for each in columns.values()]
        count = columns["total_ms"]["count"]
        lines.append(f"| {name} | {count} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Run the cell, write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-3-70b-fp8")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--switches", type=int, default=100)
    parser.add_argument("--streams", type=int, help="instead of the shape's own")
    parser.add_argument("--shapes", default=SHAPES, help="tile words/programs/warps, with commas")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    arguments = engine_options(options.shape, options.device, 0.85)
    if options.device == "cuda":
        arguments["compilation_config"] = COMPILATION
    model = write_shape(options.shape, Path(tempfile.mkdtemp(prefix="shape-")))
    result = asyncio.run(measure(options, model, as_arguments(arguments)))
    found = by_shape(result, options.shapes.split(","))
    print(table(found))
    command = " ".join(["python -m tests.bench.copy_shapes", *sys.argv[1:]])
    header = {"date": today(), "commit": commit(), "command": command}
    file = options.out / f"{today()}-copy-shapes-{options.shape}-{options.ranks}.json"
    file.write_text(json.dumps(header | {"by_shape": found, "run": result}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
