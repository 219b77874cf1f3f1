"""The GPUs: are they there, whom do they serve, do they work, and are they well."""

from __future__ import annotations

from functools import partial

from tokengap.bundle.boards.asking import ENGINE, EXPORTER, GPU, Ask, lines, named
from tokengap.bundle.boards.board import Board, Row, Tile, Word, watched
from tokengap.bundle.watch import Panel, Query, Threshold
from tokengap.series import cost, gpus

_panel = partial(Panel, "gpu")

_NONE = "no GPU is read: see how GPUs are read"
_NOT_TOLD = "no GPU here tells this"

_UP = (Word(0, "lost", "red"), Word(1, "up", "green"))
_FAULT = (Word(0, "no", "green"), Word(1, "yes", "red"))


def gpu(ask: Ask) -> Board:
    """Return the dashboard."""
    return Board(
        name="gpu",
        title="tokengap / GPU",
        description="The GPUs behind the engines: whose they are, what they do, what they draw, whether they are well.",
        rows=(_there(ask), watched(ask.seen, "gpu", "What alerts look at"), _work(ask), _power(ask), _well(ask)),
    )


def _there(ask: Ask) -> Row:
    return Row(
        "Which there are",
        (
            Tile(
                _panel(
                    title="GPUs",
                    description="The GPUs that were seen since the exporter started, MIG instances with the whole they "
                    "are part of.",
                    unit="none",
                    no_value=_NONE,
                    queries=(
                        Query(
                            ask.once(ask.select(gpus.GPU_INFO), "instance", "index", "name", "uuid", "parent"), "GPU"
                        ),
                    ),
                    drawing="table",
                ),
                width=12,
                height=7,
                columns=("instance", "index", "name", "uuid", "parent"),
            ),
            Tile(
                _panel(
                    title="Whose they are",
                    description="Which engine computes on which GPU, and how that is known. An empty engine: nobody "
                    "can tell, so its time and energy are in no cost. Several engines share one.",
                    unit="none",
                    no_value=_NONE,
                    queries=(Query(ask.once(ask.select(gpus.GPU_ENGINE), "uuid", "engine", "by"), "GPU"),),
                    drawing="table",
                ),
                width=12,
                height=7,
                columns=("uuid", "engine", "by"),
            ),
            Tile(
                _panel(
                    title="Up or lost",
                    description="Whether each GPU answers its driver. A lost one while its engine still answers makes "
                    "the engine's next step fail or hang.",
                    unit="none",
                    no_value=_NONE,
                    queries=lines(ask.once(ask.select(gpus.GPU_UP), *GPU), "uuid"),
                    drawing="state-timeline",
                ),
                width=12,
                words=_UP,
            ),
            Tile(
                _panel(
                    title="How GPUs are read",
                    description="By NVIDIA's library or a dcgm-exporter, with which driver, and why there are none. "
                    "No driver on a host without GPUs is a normal state.",
                    unit="none",
                    no_value="GPUs are not read: --no-gpu",
                    queries=(
                        Query(ask.once(ask.select(gpus.READER_INFO), "instance", "way", "driver", "reason"), "reader"),
                    ),
                    drawing="table",
                ),
                width=6,
                columns=("instance", "way", "reason", "driver"),
            ),
            Tile(
                _panel(
                    title="GPUs of each engine",
                    description="How many GPUs each engine computes on, where that is known, up and lost.",
                    unit="none",
                    no_value="no GPU is known of any engine",
                    queries=lines(ask.once(ask.select(cost.ENGINE_GPUS), *ENGINE, "state"), "engine", "state"),
                ),
                width=6,
            ),
        ),
    )


def _work(ask: Ask) -> Row:
    return Row(
        "What they do",
        (
            Tile(
                _panel(
                    title="Utilization",
                    description="Share of the driver's last sampling period in which a kernel ran. It says nothing of "
                    "how much of the GPU worked, nor for whom.",
                    unit="percentunit",
                    no_value=_NOT_TOLD,
                    queries=lines(ask.once(ask.select(gpus.UTILIZATION), *GPU), "uuid"),
                ),
                most=1,
            ),
            Tile(
                _panel(
                    title="Utilization is latched",
                    description="100 % that is no work: no process, no memory in use, idle power. Seen for days after "
                    "a process was killed in the middle of a kernel.",
                    unit="none",
                    no_value=_NOT_TOLD,
                    queries=lines(ask.once(ask.select(gpus.LATCHED), *GPU), "uuid"),
                    drawing="state-timeline",
                ),
                words=_FAULT,
            ),
            Tile(
                _panel(
                    title="Busy without tokens",
                    description="Seconds, of each second, in which a GPU of the engine worked while the engine was "
                    "idle or stuck and generated nothing.",
                    unit="percentunit",
                    no_value="no GPU is known of any engine",
                    queries=lines(ask.once(ask.rate(cost.BUSY_WITHOUT_TOKENS), *ENGINE), "engine"),
                ),
            ),
            Tile(
                _panel(
                    title="Memory",
                    description="Memory of the device in use, and all of it. Absent on devices that share the host's.",
                    unit="bytes",
                    no_value=_NOT_TOLD,
                    queries=(
                        named(ask.once(ask.select(gpus.MEMORY_USED), *GPU), "used", "uuid"),
                        named(ask.once(ask.select(gpus.MEMORY_TOTAL), *GPU), "total", "uuid"),
                    ),
                ),
            ),
            Tile(
                _panel(
                    title="Memory of processes",
                    description="What the processes on the GPU hold, where the driver tells it of each.",
                    unit="bytes",
                    no_value=_NOT_TOLD,
                    queries=lines(ask.once(ask.select(gpus.PROCESS_MEMORY), *GPU), "uuid"),
                ),
            ),
            Tile(
                _panel(
                    title="Processes",
                    description="Processes that the driver shows. 0 is no proof of an idle GPU: from inside a "
                    "container those of the host are not shown.",
                    unit="short",
                    no_value=_NOT_TOLD,
                    queries=lines(ask.once(ask.select(gpus.PROCESSES), *GPU), "uuid"),
                ),
            ),
            Tile(
                _panel(
                    title="Memory is the host's",
                    description="Devices without memory of their own, such as GB10: what their processes hold is "
                    "memory of the host.",
                    unit="none",
                    no_value=_NOT_TOLD,
                    queries=lines(ask.once(ask.select(gpus.UNIFIED_MEMORY), *GPU), "uuid"),
                    drawing="state-timeline",
                ),
                words=(Word(0, "its own", "blue"), Word(1, "the host's", "purple")),
            ),
        ),
    )


def _power(ask: Ask) -> Row:
    return Row(
        "Power, heat and clocks",
        (
            Tile(
                _panel(
                    title="Power",
                    description="Power drawn, as the driver averages it. Scope module includes the CPU beside the GPU.",
                    unit="watt",
                    no_value=_NOT_TOLD,
                    queries=lines(ask.once(ask.select(gpus.POWER), *GPU, "scope"), "uuid", "scope"),
                ),
            ),
            Tile(
                _panel(
                    title="Power for doing nothing",
                    description="Configured, or the least that was seen of each GPU: too much for one that never "
                    "rested. Energy of basis active counts from here up.",
                    unit="watt",
                    no_value=_NOT_TOLD,
                    queries=lines(ask.once(ask.select(gpus.IDLE_POWER), *GPU), "uuid"),
                ),
            ),
            Tile(
                _panel(
                    title="Energy",
                    description="Joules a second, from the driver's counter, or from power over time on devices "
                    "without one. It should lie near the power.",
                    unit="watt",
                    no_value=_NOT_TOLD,
                    queries=lines(ask.once(ask.rate(gpus.ENERGY), *GPU, "source"), "uuid", "source"),
                ),
            ),
            Tile(
                _panel(
                    title="Temperature",
                    description="Temperature of the GPU, as its driver tells it.",
                    unit="celsius",
                    no_value=_NOT_TOLD,
                    queries=lines(ask.once(ask.select(gpus.TEMPERATURE), *GPU), "uuid"),
                ),
            ),
            Tile(
                _panel(
                    title="Clock",
                    description="Clock of the streaming multiprocessors. It falls while a fault holds it down, and at "
                    "rest.",
                    unit="hertz",
                    no_value=_NOT_TOLD,
                    queries=lines(ask.once(ask.select(gpus.SM_CLOCK), *GPU), "uuid"),
                ),
            ),
            Tile(
                _panel(
                    title="Energy counter reset",
                    description="Times the driver's energy counter fell: the driver was loaded anew. What was used in "
                    "between is in no total.",
                    unit="short",
                    no_value=_NOT_TOLD,
                    queries=lines(ask.once(ask.grown(gpus.ENERGY_RESETS), *GPU), "uuid"),
                ),
            ),
        ),
    )


def _well(ask: Ask) -> Row:
    any_fault = (Threshold(">", 0, "none"),)
    return Row(
        "Are they well",
        (
            Tile(
                _panel(
                    title="Throttled by a fault",
                    description="Share of the time in which a fault held the clocks down, by fault. Idle clocks and "
                    "the software power cap are no faults.",
                    unit="percentunit",
                    no_value=_NOT_TOLD,
                    queries=lines(ask.once(ask.rate(gpus.THROTTLED), *GPU, "reason"), "uuid", "reason"),
                ),
            ),
            Tile(
                _panel(
                    title="Throttled now",
                    description="Faults that hold the clocks down at the moment of the reading. Short ones fall "
                    "between two readings: prefer the share of the time.",
                    unit="none",
                    no_value=_NOT_TOLD,
                    queries=lines(ask.once(ask.select(gpus.THROTTLING), *GPU, "reason"), "uuid", "reason"),
                    drawing="state-timeline",
                ),
                words=_FAULT,
            ),
            Tile(
                _panel(
                    title="What the driver wants done",
                    description="None, reset, reboot, or drain first: the best sign that a GPU is sick.",
                    unit="none",
                    no_value=_NOT_TOLD,
                    queries=lines(
                        f"{ask.once(ask.select(gpus.RECOVERY_ACTION), *GPU, 'action')} == 1", "uuid", "action"
                    ),
                    drawing="state-timeline",
                ),
                words=(Word(1, "asked for", "blue"),),
            ),
            Tile(
                _panel(
                    title="Errors (XID)",
                    description="Errors that the driver reported since the exporter started, by XID, and when it "
                    "reported the newest. NVIDIA's list of XIDs says what each means.",
                    unit="dateTimeAsIso",
                    no_value="none reported",
                    queries=(Query(f"{ask.once(ask.select(gpus.XID_LAST), 'instance', 'uuid', 'xid')} * 1000", "XID"),),
                    drawing="table",
                ),
                columns=("instance", "uuid", "xid"),
                value="newest",
            ),
            Tile(
                _panel(
                    title="Errors (XID) in this time",
                    description="Errors that the driver reported between two points of this graph. The first report of "
                    "an XID begins its line, so it is no rise: the table beside has it.",
                    unit="short",
                    no_value="none reported",
                    queries=lines(ask.once(ask.grown(gpus.XID_ERRORS), *GPU, "xid"), "uuid", "xid"),
                    thresholds=any_fault,
                ),
            ),
            Tile(
                _panel(
                    title="Memory errors that could not be corrected",
                    description="Between two points of this graph. Any is a reason to drain the GPU.",
                    unit="short",
                    no_value=_NOT_TOLD,
                    queries=lines(ask.once(ask.grown(gpus.ECC), *GPU), "uuid"),
                    thresholds=any_fault,
                ),
            ),
            Tile(
                _panel(
                    title="Rows of memory",
                    description="A row that could not be replaced: the GPU must be replaced. One that waits for the "
                    "next reset: reset it when it is drained.",
                    unit="none",
                    no_value=_NOT_TOLD,
                    queries=(
                        named(ask.once(ask.select(gpus.REMAP_FAILURE), *GPU), "failed", "uuid"),
                        named(ask.once(ask.select(gpus.REMAP_PENDING), *GPU), "pending", "uuid"),
                    ),
                    drawing="state-timeline",
                ),
                words=_FAULT,
            ),
            Tile(
                _panel(
                    title="PCIe replays",
                    description="Packets that had to be sent again, a second. A lasting rate is a bad contact.",
                    unit="cps",
                    no_value=_NOT_TOLD,
                    queries=lines(ask.once(ask.rate(gpus.PCIE_REPLAYS), *GPU), "uuid"),
                ),
            ),
            Tile(
                _panel(
                    title="Age of the GPUs' values",
                    description="Seconds since GPUs were last read. What is older than a few beats is not shown.",
                    unit="s",
                    no_value=_NONE,
                    queries=lines(f"time() - {ask.once(ask.select(gpus.LAST_READ), *EXPORTER)}", "instance"),
                ),
            ),
            Tile(
                _panel(
                    title="Reader processes",
                    description="Processes that read GPUs: 1, and 2 while one hangs in the driver and was given up.",
                    unit="short",
                    no_value="GPUs are not read: --no-gpu",
                    queries=lines(ask.once(ask.select(gpus.READERS), *EXPORTER), "instance"),
                    thresholds=(Threshold(">", 1, "1"),),
                ),
            ),
        ),
    )
