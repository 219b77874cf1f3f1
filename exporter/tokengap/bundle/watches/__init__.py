"""The alerts, by subject. A watch is a function of the site; :data:`SUBJECTS` holds all that are rendered and "
"tested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from tokengap.bundle.site import Site
from tokengap.bundle.watch import Watch
from tokengap.bundle.watches import admission, budgets, clients, engines, gpus, itself, orphans, queue

Make: TypeAlias = Callable[[Site], Watch]

#: The watches of each subject, in the order of a person's questions. A subject is a group of rules.
SUBJECTS: Final[Mapping[str, tuple[Make, ...]]] = {
    "queue": queue.WATCHES,
    "orphans": orphans.WATCHES,
    "clients": clients.WATCHES,
    "budgets": budgets.WATCHES,
    "engines": engines.WATCHES,
    "admission": admission.WATCHES,
    "gpus": gpus.WATCHES,
    "itself": itself.WATCHES,
}


def watches(site: Site) -> tuple[Watch, ...]:
    """Return every watch, for a site."""
    return tuple(make(site) for makes in SUBJECTS.values() for make in makes)
