"""The rank's logic runs where neither torch nor vLLM is: every module is imported anew."""

import json
import re
import subprocess
import sys
from pathlib import Path

import worker.rank

LOADED = """
import importlib, json, pkgutil, sys
import worker.rank
names = [each.name for each in pkgutil.walk_packages(worker.rank.__path__, "worker.rank.")]
for name in names:
    importlib.import_module(name)
heavy = {"torch", "transformers", "vllm"} & {each.partition(".")[0] for each in sys.modules}
engine = [each for each in sys.modules if each.startswith("worker.engine")]
print(json.dumps([names, sorted(heavy), engine]))
"""


def test_no_module_of_the_rank_s_logic_imports_torch_or_vllm() -> None:
    run = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    names, heavy, engine = json.loads(run.stdout)
    assert {"worker.rank.loop", "worker.rank.runtime", "worker.rank.migration.migration"} <= {
        *names
    }
    assert (heavy, engine) == ([], [])


def test_the_rank_s_logic_reads_no_clock() -> None:
    """Its host does; spans of traces, which nothing decides by, are the exception."""
    rank = Path(worker.rank.__file__).parent
    readers = {
        each.name
        for each in rank.rglob("*.py")
        if re.search(r"^(import time|from time import)", each.read_text(), re.MULTILINE)
    }
    assert readers == {"traced_tasks.py"}
