"""WebArena's URL evaluator: did the episode end on the right page?

`paper` compares addresses as a browser means them. `released` is the published rule: any reference's host and path as
a substring, and one of the values of every query parameter that any reference has.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Literal, NamedTuple
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

_PORTS = {"http": 80, "https": 443}


class _Address(NamedTuple):
    host: str
    port: int | None  # None: the scheme's own
    path: tuple[str, ...]
    query: Counter[tuple[str, str]]
    fragment: str


def url_match(reference: str, url: str, preset: Literal["paper", "released"] = "paper") -> float:
    """1.0 if `url` is the page that `reference` names, else 0.0.

    Equal are: host without regard to case, port (written or the scheme's own), path (percent-encoding, doubled and
    closing slashes apart), and all of the reference's query parameters in any order; others are ignored, as are http
    against https and, unless the reference has one, the fragment. " |OR| " lists alternatives.

    Raises:
        ValueError: the reference is empty or no http(s) address.
    """
    if preset == "released":
        return _released(reference, url)
    if preset != "paper":
        raise ValueError(f"preset = {preset!r} is not allowed: paper or released")
    wanted = [_address(each) for each in re.split(r"\s*\|OR\|\s*", reference.strip())]
    if None in wanted:
        raise ValueError(f"reference_url = {reference!r} is not allowed: http(s) addresses, with ' |OR| ' in between")
    seen = _address(url)
    return float(seen is not None and any(_is(seen, each) for each in wanted))


def _is(seen: _Address, wanted: _Address) -> bool:
    # A parameter without a value may as well be absent.
    missing = [pair for pair in (wanted.query - seen.query) if pair[1]]
    same_fragment = not wanted.fragment or seen.fragment == wanted.fragment
    return seen[:3] == wanted[:3] and not missing and same_fragment


def _address(url: str) -> _Address | None:
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in _PORTS or not parts.hostname:
        return None
    path: list[str] = []
    for segment in parts.path.split("/"):
        segment = unquote(segment)
        if segment == "..":
            del path[-1:]
        elif segment not in ("", "."):
            path.append(segment)
    query = Counter(parse_qsl(parts.query, keep_blank_values=True))
    port = None if port == _PORTS[parts.scheme] else port
    return _Address(parts.hostname.lower().rstrip("."), port, tuple(path), query, unquote(parts.fragment))


def _released(reference: str, url: str) -> float:
    def split(address: str) -> tuple[str, dict[str, list[str]]]:
        parts = urlsplit(address)
        return parts.netloc + parts.path, parse_qs(parts.query)

    base, query = split(url.rstrip("/"))
    wanted = [split(each.rstrip("/")) for each in reference.split(" |OR| ")]
    values: dict[str, set[str]] = {}
    for _, parameters in wanted:
        for name, given in parameters.items():
            values.setdefault(name, set()).update(given)
    on_page = any(path in base for path, _ in wanted)
    return float(on_page and all(any(v in query.get(name, []) for v in given) for name, given in values.items()))
