"""Sets up `.venv` with the locked packages; needs only Python, pip and a C compiler.

`make setup` runs it by path with the system's Python before any dependency exists, so it imports
the standard library only. Idempotent: a stamp holds the hash of the installed inputs, and the same
command resumes an unfinished set-up. A missing requirement gives one sentence and exit status 2.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".ready"
LOG = VENV / "setup.log"

PYTHONS = ((3, 11), (3, 12))
"""Versions for which the locked packages exist, best first."""
CUDA_PYTHONS = ((3, 12),)
"""Versions for which the locked packages for GPUs exist."""
NVIDIA_SMI_LIMIT_S = 20
TORCH_INDEX_ENV = "AILERON_TORCH_INDEX"
"""Environment variable with a package index for torch's CPU build, if pip cannot find it."""
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
FORMER_NAME = "aileron"
"""Distribution that an earlier set-up installed here, with a script of the same name as today's."""
LOG_TAIL_LINES = 12
PACKAGE_LINES = ("Collecting", "Processing", "Requirement already satisfied")
"""How the first line that pip prints about each package starts."""
UNPACKING_TEXT = "set-up       unpacking: minutes without a line, more on a busy disk …"


class SetupError(Exception):
    """Set-up cannot continue; the message is one sentence that says what to do."""


def main(arguments: list[str]) -> int:
    """Bring `.venv` up to the chosen lock file; returns the exit status."""
    parser = argparse.ArgumentParser(description="Set up .venv with the locked dependencies.")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu")
    device = "cuda" if parser.parse_args(arguments).device == "cuda" else "cpu"
    lock = ROOT / "requirements" / ("gpu.lock" if device == "cuda" else "cpu.lock")
    wanted = _fingerprint(lock)
    if (VENV / "bin" / "python").exists() and STAMP.exists() and STAMP.read_text() == wanted:
        return 0
    started = time.monotonic()
    try:
        _set_up(lock, device)
    except SetupError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nset-up interrupted; the same command resumes it.", file=sys.stderr)
        return 130
    STAMP.write_text(wanted)
    print(f"set-up: ready after {time.monotonic() - started:.0f} s", flush=True)
    return 0


def _set_up(lock: Path, device: str) -> None:
    if not (shutil.which("cc") or shutil.which("gcc")):
        raise SetupError("no C compiler found: install gcc (Debian: apt-get install gcc).")
    pythons = CUDA_PYTHONS if device == "cuda" else PYTHONS
    if device == "cuda":
        _require_gpu()
    _step(1, "checking Python and creating .venv")
    _create_venv(pythons)
    STAMP.unlink(missing_ok=True)
    if device == "cpu":
        _step(2, "torch, CPU build (about 190 MB)")
        _install_cpu_torch(_pinned(lock, "torch"))
    else:
        _step(2, "torch comes with the CUDA lock file")
    names = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    _step(3, f"{len(names)} locked packages from {lock.relative_to(ROOT)}")
    _pip(
        ["--no-deps", "--require-hashes", "-r", str(lock)],
        f"pip could not install {lock.relative_to(ROOT)}: check the network and the package index, "
        "then run the same command again. If it says that hashes do not match, the index serves "
        "other files than those that were tested: use another one.",
        packages=len(names),
    )
    if device == "cpu":
        _check_cpu_torch(_pinned(lock, "torch"))
    _step(4, "aileron itself")
    _uninstall(FORMER_NAME)
    # Without isolation: the build backend is locked and installed, so pip fetches nothing.
    _pip(
        ["--no-deps", "--no-build-isolation", "-e", str(ROOT)],
        "pip could not install this checkout: see the lines above.",
    )


def _uninstall(name: str) -> None:
    """Take a distribution out of `.venv`; does nothing where it is not installed."""
    python = str(VENV / "bin" / "python")
    command = [python, "-m", "pip", "uninstall", "--yes", "--quiet", name]
    subprocess.run(command, capture_output=True, check=False)


def _step(number: int, text: str) -> None:
    print(f"set-up [{number}/4] {text}", flush=True)


def _fingerprint(lock: Path) -> str:
    digest = hashlib.sha256(lock.name.encode())
    for path in (lock, ROOT / "pyproject.toml"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _pinned(lock: Path, name: str) -> str:
    for line in lock.read_text().splitlines():
        if line.startswith(f"{name}=="):
            return line.partition(" ")[0]
    raise SetupError(f"{lock.name} does not pin {name}: restore the file from git.")


def _require_gpu() -> None:
    """Refuse a machine without a GPU before gigabytes of packages for it are fetched."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"],
            capture_output=True,
            text=True,
            check=False,
            timeout=NVIDIA_SMI_LIMIT_S,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        listed = ""
    if not listed.startswith("GPU "):
        raise SetupError(
            "nvidia-smi lists no GPU here: install NVIDIA's driver for CUDA 13, or leave out "
            "DEVICE=cuda to serve on the CPU."
        )


def _create_venv(pythons: tuple[tuple[int, int], ...] = PYTHONS) -> None:
    python = VENV / "bin" / "python"
    if python.exists() and _version_of(str(python)) in pythons:
        return
    # Before the old one goes: without a fit Python it is still of use.
    base = _find_python(pythons)
    if VENV.exists():
        shutil.rmtree(VENV)
    result = subprocess.run(
        [base, "-m", "venv", str(VENV)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode:
        print(result.stdout, file=sys.stderr)
        raise SetupError(
            f"{base} cannot create a virtual environment with pip: install its venv and pip "
            "packages (Debian: apt-get install python3-venv python3-pip)."
        )


def _find_python(pythons: tuple[tuple[int, int], ...] = PYTHONS) -> str:
    """Return a Python for which the locks exist: this one, else one on PATH."""
    if sys.version_info[:2] in pythons:
        return sys.executable
    for major, minor in pythons:
        found = shutil.which(f"python{major}.{minor}")
        if found and _version_of(found) == (major, minor):
            return found
    names = " or ".join(f"{major}.{minor}" for major, minor in pythons)
    what = "for GPUs " if pythons == CUDA_PYTHONS else ""
    device = "DEVICE=cuda " if pythons == CUDA_PYTHONS else ""
    raise SetupError(
        f"Python {platform.python_version()} cannot be used {what}and no Python {names} is on "
        f"PATH: install Python {names} with its venv package, or name one with `make "
        f"PYTHON=/path/to/python{names.split()[0]} {device}setup`."
    )


def _version_of(python: str) -> tuple[int, int] | None:
    code = "import sys; print(sys.version_info[0], sys.version_info[1])"
    try:
        result = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return None
    parts = result.stdout.split()
    return (int(parts[0]), int(parts[1])) if result.returncode == 0 and len(parts) == 2 else None


def _install_cpu_torch(requirement: str) -> None:
    """Install torch's CPU build and nothing else; its dependencies are in the lock file.

    Without a hash: builds differ between indexes, so none can be pinned (docs/security.md).
    """
    index = os.environ.get(TORCH_INDEX_ENV, "")
    options = ["--no-deps", *(["--index-url", index] if index else [])]
    # The local version selects the CPU build, so that pip does not fetch a CUDA build in vain. Only
    # x86_64 Linux has both; elsewhere the plain version is the CPU build.
    both = platform.machine() in ("x86_64", "AMD64")
    _pip([*options, f"{requirement}+cpu" if both else requirement], _torch_advice(requirement))


def _check_cpu_torch(requirement: str) -> None:
    code = "import torch; print(torch.version.cuda or '')"
    result = subprocess.run(
        [str(VENV / "bin" / "python"), "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        print(result.stderr[-2000:], file=sys.stderr)
        raise SetupError("torch does not import: see the lines above.")
    if result.stdout.strip():
        raise SetupError(_torch_advice(requirement))


def _torch_advice(requirement: str) -> str:
    return (
        f"pip finds no CPU build of {requirement} for this Python: set {TORCH_INDEX_ENV}="
        f"{TORCH_INDEX} and run the same command again."
    )


def _pip(arguments: list[str], advice: str, packages: int = 0) -> None:
    """Run `pip install`; shows progress, keeps a log, and raises `advice` if pip fails."""
    command = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--progress-bar", "off"]
    count = 0
    tail: list[str] = []
    with LOG.open("a") as log:
        process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            tail = [*tail[1 - LOG_TAIL_LINES :], line]
            if packages and line.startswith(PACKAGE_LINES):
                count += 1
                _show_count(count, packages)
            elif packages and line.startswith("Installing"):
                print(UNPACKING_TEXT, flush=True)
        process.wait()
    if process.returncode:
        sys.stderr.writelines(tail)
        raise SetupError(advice)


def _show_count(count: int, packages: int) -> None:
    if sys.stdout.isatty():
        print(f"\rset-up       {count}/{packages} ", end="\n" if count == packages else "")
        sys.stdout.flush()
    elif count % 40 == 0 or count == packages:
        print(f"set-up       {count}/{packages}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
