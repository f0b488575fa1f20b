"""`aileron key`: makes an API key, prints it once, and writes its hash into the key file."""

import argparse
import os
from pathlib import Path

from pydantic import ValidationError

from coordinator.cli.errors import USAGE_STATUS, CliError
from coordinator.protocol.config import ConfigError
from coordinator.protocol.keys import ApiKey, TierName, dump_key, hash_of, load_keys, new_secret
from coordinator.protocol.mistakes import sentences_of

URGENCY: tuple[TierName, ...] = ("batch", "standard", "interactive")


def run_key(options: argparse.Namespace) -> int:
    """Make a key; raises `CliError` with one sentence that says what to change."""
    lowest, highest = options.default_tier or "batch", options.max_tier
    if URGENCY.index(lowest) > URGENCY.index(highest):
        raise CliError(
            f"--default-tier {lowest} is above --max-tier {highest}: lower it.", USAGE_STATUS
        )
    secret = new_secret()
    try:
        key = ApiKey(
            hash=hash_of(secret),
            tenant=options.tenant,
            max_tier=options.max_tier,
            default_tier=options.default_tier or _default_tier(options.max_tier),
            requests_per_minute=options.requests_per_minute,
            tokens_per_minute=options.tokens_per_minute,
        )
    except ValidationError as error:
        raise CliError(_in_options(sentences_of(error)), USAGE_STATUS) from error
    if options.file is None:
        print(f"# add this to gateway.keys_file, below `keys:`\n{dump_key(key)}", end="")
    else:
        _append(options.file, key)
        print(f"# its hash is in {options.file}; gateways read it within seconds")
    print(f"# the key, printed only this once:\n{secret}")
    return 0


def _in_options(sentences: str) -> str:
    """Name options where the sentences name the fields that they set."""
    for name in sorted(ApiKey.model_fields, key=len, reverse=True):
        sentences = sentences.replace(f"{name}:", f"{_option(name)}:").replace(
            f"{name} must", f"{_option(name)} must"
        )
    return sentences


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _default_tier(max_tier: TierName) -> TierName:
    return "batch" if max_tier == "batch" else "standard"


def _append(path: Path, key: ApiKey) -> None:
    """Add an entry; the file is replaced as a whole, so no reader sees half of it."""
    try:
        if path.exists():
            load_keys(path)
        text = path.read_text(encoding="utf-8-sig") if path.exists() else "keys:\n"
        text = text.replace("keys: []", "keys:").rstrip("\n") + "\n" + dump_key(key)
        fresh = path.with_name(f".{path.name}.new")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            out.write(text.encode())
        load_keys(fresh)
        fresh.replace(path)
    except ConfigError as error:
        raise CliError(str(error), USAGE_STATUS) from error
    except UnicodeDecodeError as error:
        raise CliError(f"{path} is not UTF-8 text: save it as UTF-8.", USAGE_STATUS) from error
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}.", USAGE_STATUS) from error
