"""Puts the hashes of all files of each pinned version into a lock file: one line per package.

The hashes are those that uv prints, which asks the package index; run from the root of a checkout,
with a lock file whose versions were changed by hand (its hashes are made anew):

    sed 's/ --hash=.*//' requirements/cpu.lock > pins.txt
    uv pip compile --no-deps --generate-hashes --python-version 3.11 pins.txt > hashed.txt
    python -m tests.with_hashes requirements/cpu.lock < hashed.txt

(3.12 and `--python-platform x86_64-manylinux_2_35` for gpu.lock.)
"""

import re
import sys
from pathlib import Path

HASH = " --hash="


def main(lock: Path, hashed: str) -> None:
    """Rewrite `lock` with the hashes in uv's output."""
    known: dict[str, list[str]] = {}
    for entry in hashed.replace("\\\n", " ").splitlines():
        known[_key(entry.partition(HASH)[0])] = sorted(re.findall(r"--hash=(\S+)", entry))
    lines = []
    for line in lock.read_text().splitlines():
        pin_here, _, _ = line.partition(HASH)
        if line and not line.startswith("#"):
            hashes = known.get(_key(pin_here), [])
            if not hashes:
                sys.exit(f"{pin_here}: uv printed no hash of it; see the lines above its output.")
            line = pin_here + "".join(HASH + each for each in hashes)  # noqa: PLW2901
        lines.append(line)
    lock.write_text("\n".join(lines) + "\n")


def _key(pin: str) -> str:
    """`Jinja2[x]==1.0 ; marker` and `jinja2==1.0` are the same."""
    name, _, version = pin.partition(";")[0].strip().partition("==")
    return re.sub(r"[-_.]+", "-", name.partition("[")[0]).lower() + "==" + version


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.stdin.read())
