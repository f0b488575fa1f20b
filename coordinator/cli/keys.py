"""`aileron key`: makes, lists and revokes API keys; a file of them holds only their hashes."""

import argparse
import json
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import ValidationError

from coordinator.cli.errors import USAGE_STATUS, CliError
from coordinator.cli.key_file import Keys, add_key, read_file, revoke_key
from coordinator.cli.tables import format_table
from coordinator.protocol.keys import (
    URGENCY,
    ApiKey,
    TierName,
    dump_key,
    hash_of,
    moment_of,
    new_secret,
    prefix_of,
)
from coordinator.protocol.mistakes import sentences_of

HEADERS = (
    *("name", "tenant", "prefix", "state", "created", "expires", "tiers"),
    *("req/min", "tok/min", "tok/day", "parallel"),
)
LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_parallel")
PREFIX_CHARS_MIN = 4
"""Shorter beginnings of a prefix or an id do not name a key to revoke."""

_SPAN = re.compile(r"([1-9]\d{0,5})([dhm])")
_UNITS = {"d": "days", "h": "hours", "m": "minutes"}


def run_key_new(options: argparse.Namespace) -> int:
    """Make a key; raises `CliError` with one sentence that says what to change."""
    now = datetime.now(UTC).replace(microsecond=0)
    secret = new_secret()
    if options.file is None:
        key = _new_key(options, secret, {}, now)
        print(f"# add this to gateway.keys_file, below `keys:`\n{dump_key(key)}", end="")
    else:
        key = add_key(options.file, lambda keys: _new_key(options, secret, keys, now))
        print(f"# {key.name}: its hash is in {options.file}; gateways read it within seconds")
    print(f"# the key, printed only this once:\n{secret}")
    return 0


def run_key_list(options: argparse.Namespace) -> int:
    """Print the keys of a file, without what could be used as one; raises `CliError`."""
    now = datetime.now(UTC)
    keys = read_file(options.file).values()
    if options.json:
        print(json.dumps({"keys": [_view(key, now) for key in keys]}, indent=2))
    elif not keys:
        print(f"{options.file} holds no keys: add one with `aileron key new`.")
    else:
        print(format_table(HEADERS, (_row(key, now) for key in keys)))
    return 0


def run_key_revoke(options: argparse.Namespace) -> int:
    """Mark a key as revoked; raises `CliError` if the word names none, or several."""
    now = datetime.now(UTC).replace(microsecond=0)
    was_revoked = False

    def find(keys: Keys) -> ApiKey:
        nonlocal was_revoked
        key = find_key(options.key, keys)
        was_revoked = key.revoked is not None
        return key

    key = revoke_key(options.file, find, now)
    assert key.revoked is not None
    if was_revoked:
        print(f"{_title(key)} is revoked already, since {_day(key.revoked)}.")
    else:
        print(f"{_title(key)} is revoked: gateways refuse it within seconds.")
    return 0


def find_key(word: str, keys: Keys) -> ApiKey:
    """Return the key with a name, a beginning of its prefix or id, or the key itself.

    Of several the word names those that are not revoked. Raises `CliError`.
    """
    if (whole := keys.get(hash_of(word))) is not None:
        return whole
    found = [key for key in keys.values() if key.name == word]
    if not found and len(word) >= PREFIX_CHARS_MIN:
        beginnings = ((key, (key.prefix, key.id, key.hash)) for key in keys.values())
        found = [key for key, all_of in beginnings if any(each.startswith(word) for each in all_of)]
    found = [key for key in found if key.revoked is None] or found
    if not found:
        raise CliError(
            "no key has this name or prefix: see `aileron key list --file FILE`.", USAGE_STATUS
        )
    if len(found) > 1:
        names = ", ".join(map(_title, found))
        raise CliError(
            f"{len(found)} keys fit: {names}. Use more of the prefix, or the id that "
            "`aileron key list --json` prints.",
            USAGE_STATUS,
        )
    return found[0]


def expiry_of(text: str, now: datetime) -> datetime:
    """Read `--expires`: a date, a time, or a span such as 90d; raises `CliError`."""
    try:
        if (span := _SPAN.fullmatch(text)) is not None:
            moment = now + timedelta(**{_UNITS[span[2]]: int(span[1])})
        else:
            moment = moment_of(text)
    except (ValueError, OverflowError) as error:
        raise CliError(
            "--expires must be a span such as 90d, 12h or 30m, a date such as 2027-01-31, or a "
            "time such as 2027-01-31T12:00:00Z.",
            USAGE_STATUS,
        ) from error
    if moment <= now:
        raise CliError("--expires lies in the past: use a later time.", USAGE_STATUS)
    return moment


def _new_key(options: argparse.Namespace, secret: str, keys: Keys, now: datetime) -> ApiKey:
    names = {key.name for key in keys.values()}
    if options.key_name in names:
        raise CliError(f"--name {options.key_name} is taken: use another one.", USAGE_STATUS)
    try:
        key = ApiKey(
            hash=hash_of(secret),
            tenant=options.tenant,
            name=options.key_name or "",
            prefix=prefix_of(secret),
            created=now,
            expires=expiry_of(options.expires, now) if options.expires else None,
            max_tier=options.max_tier,
            default_tier=options.default_tier or _default_tier(options.max_tier),
            **{name: limit for name in LIMITS if (limit := getattr(options, name)) is not None},
        )
    except ValidationError as error:
        raise CliError(_in_options(sentences_of(error)), USAGE_STATUS) from error
    return key if key.name else key.model_copy(update={"name": _free_name(key.tenant, names)})


def _free_name(tenant: str, names: Iterable[str]) -> str:
    """Return a name for a tenant's key that no other key has."""
    taken, number = set(names), 1
    while (name := tenant if number == 1 else f"{tenant[:56]}-{number}") in taken:
        number += 1
    return name


def _in_options(sentences: str) -> str:
    """Name options where the sentences name the fields that they set."""
    for name in sorted(ApiKey.model_fields, key=len, reverse=True):
        sentences = re.sub(rf"(?<![\w-]){name}(?=:| must| \w+:)", _option(name), sentences)
    return sentences


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _default_tier(max_tier: TierName) -> TierName:
    return min("standard", max_tier, key=URGENCY.index)


def _title(key: ApiKey) -> str:
    """Return what a person calls a key, with what tells it from others."""
    mark = f"{key.prefix}…" if key.prefix else key.id
    return f"{key.name} ({mark})" if key.name else mark


def _day(moment: datetime | None) -> str:
    return "-" if moment is None else moment.strftime("%Y-%m-%d %H:%M")


def _row(key: ApiKey, now: datetime) -> list[object]:
    default = min(key.default_tier, key.max_tier, key=URGENCY.index)
    return [
        key.name or "-",
        key.tenant,
        f"{key.prefix}…" if key.prefix else key.id,
        key.state(now),
        _day(key.created),
        _day(key.expires),
        key.max_tier if default == key.max_tier else f"{default}, at most {key.max_tier}",
        *(getattr(key, name) or "-" for name in LIMITS),
    ]


def _view(key: ApiKey, now: datetime) -> dict[str, Any]:
    fields = key.model_dump(mode="json", exclude={"hash"})
    return {"id": key.id, "state": key.state(now), **fields}
