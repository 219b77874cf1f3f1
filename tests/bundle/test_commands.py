"""Every command of a runbook that is about our own programs is run, as it stands there, against a lab in that state.

Nothing here names a watch but :data:`STATES`: a further watch with its commands is tried without a line of its own,
and needs one only where its commands are for an engine that is not merely busy.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from bundle.sites import DEFAULT
from lab.commands import COMMAND
from lab.serving import engine as an_engine
from lab.serving import until
from tokengap.bundle.site import Site
from tokengap.bundle.watch import Step
from tokengap.bundle.watches import watches
from tokengap.lab.batching import Knobs
from tokengap.lab.nvml.fake import FakeNvml
from tokengap.lab.nvml.profiles import H100, many
from tokengap.lab.parts import LOOPBACK, RunningPart, free_port
from tokengap.lab.scrape import Exporter
from tokengap.lab.stage import Plan, lab_parts, ports, staged
from tokengap.lab.truth import EngineControl
from tokengap.lab.users import User, Visit

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

#: Programs whose commands are run: ours, and what reads our pages. The others are of the host that has the trouble.
TRIED = ("tokengap", "curl")

STEPS = [
    pytest.param(watch.name, number, id=f"{watch.name}-{number + 1}")
    for watch in watches(DEFAULT)
    for number, step in enumerate(watch.runbook.diagnosis)
    if step.command.split()[0] in TRIED
]


@dataclass(frozen=True)
class Lab:
    """A busy engine on two GPUs behind a gateway that holds on to clients who left, and the exporter on them."""

    site: Site
    engine: EngineControl
    engine_part: RunningPart
    nvml: FakeNvml

    def step(self, alert: str, number: int) -> Step:
        (watch,) = [one for one in watches(self.site) if one.name == alert]
        return watch.runbook.diagnosis[number]


@asynccontextmanager
async def frozen(lab: Lab) -> AsyncIterator[Lab]:
    """An engine that makes no progress, and an exporter that has seen it."""
    await lab.engine.freeze()
    try:
        yield lab
    finally:
        await lab.engine.thaw()


@asynccontextmanager
async def hung_with_its_gpu(lab: Lab) -> AsyncIterator[Lab]:
    """An engine that makes no progress since one of its GPUs is lost."""
    lab.nvml.lose(1)
    try:
        async with frozen(lab):
            yield lab
    finally:
        lab.nvml.say()


@asynccontextmanager
async def silent(lab: Lab) -> AsyncIterator[Lab]:
    """An engine that takes connections and answers nothing."""
    lab.engine_part.signal(signal.SIGSTOP)
    try:
        yield lab
    finally:
        lab.engine_part.signal(signal.SIGCONT)


@asynccontextmanager
async def dead(lab: Lab) -> AsyncIterator[Lab]:
    """Nobody where an engine was."""
    yield replace(lab, site=replace(lab.site, engine=f"http://{LOOPBACK}:{free_port()}"))


@asynccontextmanager
async def idle(lab: Lab) -> AsyncIterator[Lab]:
    """An engine that has nothing to do."""
    async with an_engine() as port:
        yield replace(lab, site=replace(lab.site, engine=f"http://{LOOPBACK}:{port}"))


@asynccontextmanager
async def busy(lab: Lab) -> AsyncIterator[Lab]:
    """As the lab is."""
    yield lab


#: In which state the commands of an alert's runbook are run, where it is not a busy one.
STATES: Mapping[str, Callable[[Lab], AbstractAsyncContextManager[Lab]]] = {
    "TokengapEngineStuck": frozen,
    "TokengapEngineDead": dead,
    "TokengapEngineBlind": silent,
    "TokengapGpuLost": hung_with_its_gpu,
    "TokengapGpuBusyWithoutTokens": idle,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> AsyncIterator[Lab]:
    directory = tmp_path_factory.mktemp("lab")
    nvml = FakeNvml(nvml_library, directory / "nvml.control")
    gpus = many(H100, 2)
    nvml.set(*gpus)
    plan = Plan(through=("naive",), leak="edge", knobs=Knobs(rate=10), ports=ports("auto"))
    site = replace(
        DEFAULT,
        window=0.5,
        exporter=f"http://{LOOPBACK}:{plan.ports.exporter}",
        engine=f"http://{LOOPBACK}:{plan.ports.engine}",
    )
    *others, exporter = lab_parts(plan, directory)
    nvidia = (f"{name}={nvml.environment[name]}" for name in ("LD_LIBRARY_PATH", "FAKE_NVML_CONTROL"))
    command = ("env", *nvidia, *exporter.command, "--window", f"{site.window}s")
    async with (
        staged([*others, replace(exporter, command=command)], directory) as stage,
        aiohttp.ClientSession() as session,
    ):
        engine = stage.parts[0]
        nvml.set(*(replace(gpu, processes={engine.pid: 60 << 30}) for gpu in gpus))
        await Exporter(site.exporter, session).ready()
        leavers = [User(f"leaver-{n}", max_tokens=100_000, leave_at=1.0) for n in range(2)]
        users = leavers + [User(f"patient-{n}", max_tokens=100_000) for n in range(6)]
        visits = [asyncio.create_task(Visit(user, plan.entry).run()) for user in users]
        yield Lab(site, EngineControl(plan.ports.engine), engine, nvml)
        for visit in visits:
            visit.cancel()
        await asyncio.gather(*visits, return_exceptions=True)


async def run(command: str, within: float = 60.0) -> tuple[int | None, str]:
    """Return the exit code and the output of a command. One of ours that does not end in time tells where it hangs."""
    process = await asyncio.create_subprocess_shell(
        command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"PYTHONFAULTHANDLER": "1"},
        start_new_session=True,
    )
    printed = asyncio.ensure_future(process.communicate())
    done, _ = await asyncio.wait([printed], timeout=within)
    if not done:
        os.killpg(process.pid, signal.SIGABRT)
        said = (await printed)[0].decode()
        pytest.fail(f"$ {command}\n{said}\nthis did not end within {within:g} s")
    return process.returncode, printed.result()[0].decode()


def form(line: str) -> re.Pattern[str]:
    """Return what a printed line has to look like: the example, with any number for its numbers and anything for
    three dots."""
    any_number = re.sub(r"\d+(?:\\\.\d+)?", lambda _: r"\d+(?:\.\d+)?", re.escape(line.strip()))
    return re.compile(any_number.replace(re.escape("..."), ".*"))


@pytest.mark.parametrize(("alert", "number"), STEPS)
async def test_a_command_of_a_runbook(lab: Lab, alert: str, number: int):
    """It exits as the runbook says and prints what its example looks like."""
    said = "nothing yet"

    async def as_said() -> bool:
        nonlocal said
        code, printed = await run(command)
        said = f"{printed}\nexit {code}"
        return code == step.code and all(form(line).search(said) for line in step.prints.splitlines())

    async with STATES.get(alert, busy)(lab) as here:
        step = here.step(alert, number)
        program, _, rest = step.command.partition(" ")
        assert shutil.which(program) or program == "tokengap", f"{program} is not installed: apt-get install {program}"
        command = f"{' '.join(COMMAND)} {rest}" if program == "tokengap" else step.command
        try:
            await until(as_said, within=10)  # the exporter follows what happens by a beat or two
        except AssertionError:
            pytest.fail(f"$ {step.command}\n{said}\n\nThe runbook says, with exit {step.code}:\n{step.prints}")


@pytest.mark.parametrize(
    ("example", "said", "fits"),
    [
        ("busy: running 4", "http://h busy: running 12, waiting 1", True),
        ("still for 20.0 s", "still for 1.2 s", True),
        ("still for 20 s", "stuck for 20 s", False),
        ('"id":3,...,"client":"gone"', '[{"id":1,"hop":"edge","client":"gone"}]', True),
        ('"id":3,...,"client":"gone"', '[{"id":1,"hop":"edge","client":"connected"}]', False),
    ],
)
async def test_an_example_fits_what_looks_like_it(example: str, said: str, fits: bool):
    """Numbers may differ and dots stand for anything; words may not."""
    assert bool(form(example).search(said)) == fits
