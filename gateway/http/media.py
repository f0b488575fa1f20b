"""Which media a chat message may name: inline data, and URLs of allowed domains.

A client could make a server that fetches any URL read its own network and files. So nothing is
fetched unless its domain is in `gateway.media_domains`. `gateway.engine.media` checks the resolved
addresses at the fetch. Called by the body check. Pure.
"""

import ipaddress
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from gateway.errors import MEDIA_TEXT, ApiError, api_error
from gateway.http.large_bytes import contains

_MEDIA_KEYS = frozenset({"image_url", "video_url", "audio_url", "image_embeds", "file", "file_url"})
_MARKS = (b"_url", b"file", b"image_embeds", b"\\u")
"""A message without any of these bytes names no media; a key may be written with escapes."""

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""IPv6 addresses that stand for IPv4 ones (RFC 6052)."""

_PLAIN_URL = re.compile(r"[!-\[\]-~]+")
"""Printable ASCII without the backslash, which URL parsers treat differently."""


def check_media(
    messages: bytes, domains: frozenset[str], param: str = "messages"
) -> ApiError | None:
    """Return the error in the media that messages name; `param` is the field they come from."""
    if not any(contains(messages, mark) for mark in _MARKS):
        return None
    for url in _urls(msgspec.json.decode(messages)):
        if not is_allowed(url, domains):
            return api_error("invalid_value", MEDIA_TEXT, param)
    return None


def _urls(value: Any) -> Iterator[object]:
    """Yield every media reference at any depth; the caller has bounded the nesting."""
    if isinstance(value, list):
        for each in value:
            yield from _urls(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key in _MEDIA_KEYS and each is not None:
                yield each.get("url", "") if isinstance(each, dict) else each
            else:
                yield from _urls(each)


def is_allowed(url: object, domains: frozenset[str]) -> bool:
    """Return whether a request may name this URL."""
    if not isinstance(url, str):
        return False
    if url[:5].lower() == "data:":
        return True
    if not _PLAIN_URL.fullmatch(url):
        return False
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".")
    except ValueError:
        return False
    if parts.scheme not in ("http", "https") or "@" in parts.netloc:
        return False
    return host in domains and not _is_private(host)


def is_public(address: str) -> bool:
    """Return whether an IP address belongs to one host on the internet, even if wrapped.

    Raises ValueError if it is no address.
    """
    plain = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(plain, ipaddress.IPv6Address):
        inner = plain.ipv4_mapped or plain.sixtofour
        if plain in _NAT64:
            inner = ipaddress.IPv4Address(plain.packed[-4:])
        if inner is not None:
            return is_public(str(inner))
    return plain.is_global and not plain.is_multicast


def _is_private(host: str) -> bool:
    """Return whether a host is an address that only this network has."""
    try:
        return not is_public(host)
    except ValueError:
        return host == "localhost"
