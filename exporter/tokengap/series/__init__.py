"""NAME: pure, view to samples. The only place with series names.

A series is one :class:`~tokengap.series.declare.Series` value in the file of its subject. What is in :data:`SERIES` is
on the page, in ``docs/series.md`` and known to dashboards and alerts; there is no second list.
"""

from __future__ import annotations

from tokengap.series.admit import ADMISSION
from tokengap.series.cost import COST
from tokengap.series.declare import Series
from tokengap.series.engines import ENGINES
from tokengap.series.gpus import GPUS
from tokengap.series.itself import ITSELF
from tokengap.series.proxies import PROXIES
from tokengap.series.queue import QUEUE
from tokengap.series.streams import STREAMS_IN_FLIGHT
from tokengap.series.tokens import TOKENS

#: Every series, in the order of the page.
SERIES: tuple[Series, ...] = (
    *TOKENS,
    *STREAMS_IN_FLIGHT,
    *PROXIES,
    *QUEUE,
    *ADMISSION,
    *ENGINES,
    *COST,
    *GPUS,
    *ITSELF,
)
