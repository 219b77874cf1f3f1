"""One alert, and the experiment that rehearses it: ``python -m chaos.alerting TokengapEngineStuck``.

A process of its own, because the bench may move into a network of its own. The fault stays until a real Prometheus,
with the rules that are rendered for such a bench, says that the alert fires; then it is healed. Prints the seconds.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from deployed import prometheus_config
from monitoring import aimed, prometheus
from tokengap.bundle.render.file import as_yaml
from tokengap.bundle.render.rules import alerts
from tokengap.bundle.site import Site
from tokengap.chaos.bench import KNOBS, LOAD, Bench, Plan, put_up
from tokengap.chaos.experiments import EXPERIMENTS, Options
from tokengap.chaos.faults import NotProven
from tokengap.lab.network import Network, own_network

#: Seconds after which an alert will not fire any more.
NEVER = 300.0

#: How often Prometheus comes, seconds.
SCRAPE = 1.0


@dataclass(frozen=True)
class Case:
    """An experiment as the runbook of an alert asks for it."""

    experiment: str
    options: Options = Options()  # noqa: RUF009 - frozen, and of values only
    through: str = "haproxy"
    slots: int = KNOBS.max_num_seqs
    users: int = LOAD.users
    read_timeout: float = 5.0


CASES = {
    "TokengapDown": Case("exporter-gone"),
    "TokengapEngineStuck": Case("engine-freeze"),
    "TokengapEngineDead": Case("engine-crash"),
    "TokengapOrphanHoldsSlot": Case("partition-client", Options(tokens=4000), through="nginx"),
    "TokengapSlotsPinnedAfterDisconnects": Case(
        "partition-client", Options(tokens=4000, clients=8), through="nginx", slots=4, users=2
    ),
    "TokengapGpuLost": Case("gpu-lost"),
    "TokengapQueueWillMissDeadline": Case("disconnect-storm", slots=2, users=4, read_timeout=60.0),
}


async def fires(alert: str, directory: Path) -> float:
    """Return how many seconds after its fault was applied the alert fired."""
    case = CASES[alert]
    experiment = EXPERIMENTS[case.experiment]
    network = await own_network() if experiment.network else None
    assert network is None or isinstance(network, Network), network
    plan = Plan(
        through=case.through,
        gpus=experiment.gpus,
        knobs=replace(KNOBS, max_num_seqs=case.slots),
        load=replace(LOAD, users=case.users),
        read_timeout=case.read_timeout,
    )
    rules = directory / "rules.yml"
    rules.write_text(as_yaml(alerts(Site(window=plan.window, scrape=SCRAPE))))
    fault = experiment.fault(case.options)
    firing = f'ALERTS{{alertname="{alert}",alertstate="firing"}}'
    async with AsyncExitStack() as stack:
        bench = await stack.enter_async_context(put_up(plan, directory, network))
        target = bench.exporter.url.removeprefix("http://")
        config = aimed(prometheus_config(), [target], [rules], SCRAPE)
        asked = await stack.enter_async_context(prometheus(config, directory))
        tasks = [asyncio.create_task(bench.crowd.come()), asyncio.create_task(bench.look_for_ever(fault.kills))]
        try:
            await asyncio.sleep(8.0)  # what is well for so long fires nothing
            assert await asked.query(firing) == []
            broken = time.monotonic()
            print(await fault.apply(bench), file=sys.stderr)
            await asked.until(firing, bool, NEVER)
            took = time.monotonic() - broken
            print(await applied(fault, bench), file=sys.stderr)
        finally:
            print(await fault.heal(bench), file=sys.stderr)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return took


async def applied(fault, bench: Bench) -> str:
    """Return what shows that the fault is there; some show a moment late."""
    for _ in range(50):
        try:
            return await fault.applied(bench)
        except NotProven as missing:
            last = missing
            await asyncio.sleep(0.2)
    raise last


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="tokengap-alerting-") as name:
        print(f"{asyncio.run(fires(sys.argv[1], Path(name))):.1f}")
