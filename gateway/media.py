"""Which media a chat message may name: inline data, and URLs of domains that are allowed.

A server that fetches what clients name can be made to read its own network and its own files, so
nothing is fetched unless its domain is in `gateway.media_domains`. Called by the body check. Pure.
"""

import ipaddress
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from gateway.errors import ApiError, api_error

_MEDIA_KEYS = frozenset({"image_url", "video_url", "audio_url", "image_embeds", "file"})
_MARKS = (b"_url", b"file", b"image_embeds", b"\\u")
"""Without one of these in its bytes a message names no media; a key may be written in escapes."""

_PLAIN_URL = re.compile(r"[!-\[\]-~]+")
"""Printable ASCII but the backslash, about which URL parsers do not agree."""


def check_media(messages: bytes, domains: frozenset[str]) -> ApiError | None:
    """Return what is wrong with the media that messages name."""
    if not any(mark in messages for mark in _MARKS):
        return None
    for url in _urls(msgspec.json.decode(messages)):
        if not _is_allowed(url, domains):
            text = (
                "Media must be inline (a data: URL) or come from an allowed domain; the server's "
                "operator sets gateway.media_domains."
            )
            return api_error("invalid_value", text, "messages")
    return None


def _urls(value: Any) -> Iterator[object]:
    """Yield every media reference at any depth; the nesting is bounded already."""
    if isinstance(value, list):
        for each in value:
            yield from _urls(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key in _MEDIA_KEYS and each is not None:
                yield each.get("url", "") if isinstance(each, dict) else each
            else:
                yield from _urls(each)


def _is_allowed(url: object, domains: frozenset[str]) -> bool:
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


def _is_private(host: str) -> bool:
    """Say whether a host is an address that only this network has."""
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return host == "localhost"
