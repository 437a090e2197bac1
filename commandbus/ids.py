"""Ids of commands. No Django: other programs have to compute the same."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from uuid import NAMESPACE_URL, UUID, uuid5

_VERSION_AND_VARIANT = 7 << 76 | 2 << 62
_lock = threading.Lock()
_last = 0


def uuid7() -> UUID:
    """A new id of version 7 (RFC 9562): ids that are made one after the other lie side by side in PostgreSQL's indexes.

    It begins with the time in milliseconds and their 4096th parts, which this process uses once each.
    """
    global _last
    with _lock:
        now = _last = max(time.time_ns() * 4096 // 1_000_000, _last + 1)
    high = now >> 12 << 80 | (now & 0xFFF) << 64
    return UUID(int=high | _VERSION_AND_VARIANT | int.from_bytes(os.urandom(8), "big") >> 2)


def derived_id(domain: str, command_type: str, key: Iterable[object]) -> UUID:
    """The id of the one command of this domain and type that has this key, today and in every later run.

    It is the UUID of version 5 (SHA-1, RFC 9562) of the key in a namespace of domain and type, which is itself
    version 5 of "commandbus:<domain>/<type>" in RFC 9562's namespace for URLs. The key is written as a JSON array,
    in UTF-8: no white space, no escapes but those that JSON demands, the keys of objects sorted. So text is not the
    number that it looks like, and the order of the fields counts.

    >>> derived_id("payments", "DebitAccount", ["DE-1", 7])
    UUID('ce3bebed-a9b5-586f-a070-f4b019355a7c')
    """
    space = uuid5(NAMESPACE_URL, f"commandbus:{domain}/{command_type}")
    text = json.dumps(list(key), ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return uuid5(space, text)
