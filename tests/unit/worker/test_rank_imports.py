"""The rank's logic runs where neither torch nor vLLM is: every module is imported anew."""

import json
import subprocess
import sys

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
