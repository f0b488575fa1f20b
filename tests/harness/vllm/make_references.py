"""`python -m tests.harness.vllm.make_references [NAME...]`: makes references anew, or these."""

import sys
import tempfile
import time
from pathlib import Path

from tests.harness.vllm.quantized_models import plain_model
from tests.harness.vllm.reference_catalog import CATALOG
from tests.harness.vllm.reference_files import FOLDER, compute, save


def main() -> int:
    """Make one after the other, and say what each took."""
    names = sys.argv[1:] or list(CATALOG)
    unknown = set(names) - set(CATALOG)
    if unknown:
        print(f"no such reference: {', '.join(sorted(unknown))}; there are {', '.join(CATALOG)}")
        return 2
    for number, name in enumerate(names, 1):
        print(f"{number} of {len(names)}: {name} ...", flush=True)
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            model = plain_model(CATALOG[name].model, Path(folder))
            path = save(CATALOG[name], model, compute(CATALOG[name], model, Path(folder)))
        took = time.monotonic() - started
        print(f"  {path.name}: {path.stat().st_size:,} bytes, {took:.0f} s", flush=True)
    for path in FOLDER.glob("*.npz"):
        if path.name.rsplit("-", 1)[0] not in CATALOG:
            print(f"{path.name} is no reference any more")
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
