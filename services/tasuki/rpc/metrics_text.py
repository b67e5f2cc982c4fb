"""Joins texts in Prometheus' format without parsing their values: a scrape takes the coordinator's event loop."""

from __future__ import annotations

import re
from collections.abc import Iterable

_FAMILY = re.compile(r"^(?=# HELP )", re.MULTILINE)
_OPENING = re.compile(r"^([^\s{#]+)(\{|(?= ))", re.MULTILINE)
_OWN = re.compile(r'[{,]service="')
_UNSEEN = "_created"
"""Suffix of families with the times at which counters were made."""


def join_texts(texts: Iterable[tuple[str, str | None]]) -> str:
    """One family of each name, with the samples of all texts.

    texts: of `prometheus_client.generate_latest`, each with the service whose label its samples get, or None. A family that
    has the label keeps it. Families without samples and creation times are left out.
    """
    heads: dict[str, str] = {}
    samples: dict[str, list[str]] = {}
    for text, service in texts:
        for family in filter(None, _FAMILY.split(text)):
            meaning, kind, found = family.split("\n", 2)
            name = meaning.split(" ", 3)[2]
            if found and not name.endswith(_UNSEEN):
                heads.setdefault(name, f"{meaning}\n{kind}\n")
                samples.setdefault(name, []).append(found if service is None else _labelled(found, service))
    return "".join(heads[name] + "".join(parts) for name, parts in samples.items())


def _labelled(samples: str, service: str) -> str:
    if _OWN.search(samples):
        return samples
    return _OPENING.sub(lambda found: f'{found[1]}{{service="{service}"{"," if found[2] else "}"}', samples)
