"""Is the engine working? The verdict, read off its page and its sockets: the rule stands once, here, as a table.

:data:`TABLE` is tried from the top; the first row that holds decides. What the rows read is worked out before, in
:func:`_learn`; ``docs/verdict.md`` shows the table as :func:`table` draws it.

What counts as *progress* between two pages, and what does not:

* generation tokens, prompt tokens, first tokens, steps *with* a growing token sum, preemptions, finished requests, KV-
  cache usage, and what else a family of engines counts only while it computes (``work``): any change is progress.
* Steps alone are not: a V0 engine at rest counts one every 10 s. Nor does their absence mean a hang: a chunked prefill
  shows none until its first token (vLLM issue 51261), only KV usage moves.
* Bytes on a socket are not: vLLM 0.30 and newer send SSE keep-alive comments.
* ``/health`` and ``/v1/models`` are never asked: both answer 200 while the core hangs (issues 42897, 45094).

Families differ in what they show. An engine whose page moves only when a request *ends* is never called stuck: it shows
the same while it computes a long answer. One that makes its page between two steps of its inference loop (llama.cpp) is
silent for as long as a step lasts, which is work and no fault, and silent for ever when it hangs.

What cannot be known: the ranks of one page are summed, so one that hangs hides behind others that work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tokengap.readings import EnginePage, Reading
from tokengap.topology import Limits
from tokengap.view import EngineState

#: The fields that only ever grow within one process, and the words for those whose growth is progress.
_COUNTERS = (
    "generation_tokens",
    "prompt_tokens",
    "first_tokens",
    "steps",
    "step_tokens",
    "work",
    "preemptions",
    "finished",
    "finished_tokens",
)
_PROGRESS = {
    "generation_tokens": "generation",
    "prompt_tokens": "prompt",
    "first_tokens": "first tokens",
    "step_tokens": "step tokens",
    "work": "work",
    "preemptions": "preemptions",
    "finished": "finished",
}

#: Windows without progress that make an engine stuck: a short pause is not a fault.
WINDOWS = 2

#: Seconds in "restarts in the last hour", and how many of them are counted at most.
HOUR, MAX_RESTARTS = 3600.0, 1000

#: Sets of counters remembered after reads moved on to others, to know them again.
MAX_LEFT = 4


@dataclass(frozen=True, slots=True)
class Left:
    """The last page of a set of counters, and when the reads went over to another."""

    page: EnginePage
    at: float


@dataclass(frozen=True, slots=True)
class VerdictState:
    """What is remembered of one engine. Instants are monotonic seconds, None for never.

    ``page``: the newest page, a field that it lacked filled from the page before. ``quiet``: seconds without progress
    while work was in flight, where a gap between two reads counts one window at most. ``moved_at``: the last progress,
    or when work came in flight. ``prefilling``: a request was started and no prompt was finished since;
    to begin with, whether what runs on the first page is taken to be so.
    ``began_at``: since when the counters are new, until their first progress; ``began_anew`` tells a new process from
    counters that were reset. ``left``: sets of counters that reads went over from; ``mixed_at``: when reads last came
    back to one. ``refused`` and ``failing_at``: what happened since ``page``. ``silent``: seconds since then in which
    the page has not come and no stream carried a byte, counted as ``quiet`` is, and ``silent_at`` up to when.
    """

    page: EnginePage | None = None
    page_at: float = 0.0
    in_flight: bool = False
    quiet: float = 0.0
    moved_at: float = 0.0
    prefilling: bool = False
    began_at: float | None = None
    began_anew: bool = False
    left: tuple[Left, ...] = ()
    mixed_at: float | None = None
    refused: bool = False
    failing_at: float | None = None
    silent: float = 0.0
    silent_at: float | None = None
    restarts: int = 0
    restarted_at: tuple[float, ...] = ()
    ghost_steps: float = 0.0
    ghost_at: float | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict and what it rests on.

    ``progress_age``: seconds since the engine last moved (or since work came in flight, if later); None while it has no
    work, cannot be read, or its counters are new. ``moved`` says what progressed since the page before, empty where
    nothing did. ``restarts`` counts new processes seen, not resets within one; ``restarts_last_hour`` those of late.
    ``ghost_steps`` counts steps that brought no token while the engine ran more than has an open socket: its front end
    drops the output of requests whose client left, the core goes on.
    """

    state: EngineState
    evidence: str
    progress_age: float | None
    restarts: int
    ghost_steps: float
    moved: str = ""
    restarts_last_hour: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rows of the table read: one beat's page and sockets, and what the pages before it add to them."""

    page: EnginePage | None
    error: str
    refused: bool
    failing: float  # seconds since the first reading in a row that failed
    behind: bool  # there is no page because the engine, which had work, makes it between two steps
    silent: float  # as in VerdictState
    streams: int | None  # open streams towards the engine; None: the sockets do not tell
    flowing: bool  # any of them carried bytes just now
    moved: str  # what progressed since the page before, in words; empty: nothing did
    quiet: float  # as in VerdictState
    still: float  # seconds since it last moved, as a clock on the wall counts them
    prefilling: bool
    ghosts: bool  # ghost steps within one window
    began: float | None  # seconds since its counters began anew
    anew: bool
    mixed: bool  # several sets of counters answer, within two windows
    limits: Limits

    @property
    def live(self) -> bool:
        """Something on the page moves while a request runs."""
        return self.page is None or self.page.live

    @property
    def told(self) -> bool:
        """The page tells how much is in flight."""
        return self.page is not None and not (self.page.running is None and self.page.waiting is None)

    @property
    def running(self) -> float:
        """Requests running, 0 where not told."""
        return (self.page.running if self.page else None) or 0.0

    @property
    def waiting(self) -> float:
        """Requests waiting, 0 where not told."""
        return (self.page.waiting if self.page else None) or 0.0

    @property
    def queued(self) -> float:
        """Requests waiting for nothing but this engine."""
        return self.waiting - ((self.page.deferred if self.page else None) or 0.0)

    @property
    def engine_has_work(self) -> bool:
        """The engine says that requests are in flight."""
        return self.running + self.waiting > 0

    @property
    def in_flight(self) -> bool:
        """The engine or the sockets say so, or, where the page lacks both gauges, progress does."""
        return self.engine_has_work or bool(self.streams) or (not self.told and bool(self.moved))

    @property
    def patience(self) -> float:
        """Quiet seconds that make an engine stuck which cannot be in a prefill."""
        return WINDOWS * self.limits.window

    @property
    def may_prefill(self) -> bool:
        """A prompt may be in the making that shows nothing.

        Either a running request has not shown its first token, or the engine does not know yet of the requests that
        its sockets show: its gauges lag by up to 18 s at a cold start (issue 49538), and before 0.10.2 were not set
        during a chunked prefill. An engine that makes its page between two steps proves with each page that it steps;
        llama.cpp prints its counters with six digits, so that large ones seem to stand still. And where all requests
        wait for something else, such as KV blocks, their prompts are in the making on another node.
        """
        steps = self.page is not None and self.page.between_steps
        elsewhere = self.running == 0 and self.queued <= 0 < self.waiting
        return self.prefilling or steps or elsewhere or (not self.engine_has_work and bool(self.streams))

    @property
    def quiet_until(self) -> str:
        """What more quiet will make of a busy engine, and when."""
        if self.engine_has_work and self.streams == 0:
            return f"idle from {self.limits.window:g} s"
        budget = self.limits.prefill_budget if self.may_prefill else 0.0
        return f"stuck from {max(self.patience, budget):g} s"


@dataclass(frozen=True, slots=True)
class Row:
    """One row: when it holds (in words and in code), the verdict, its evidence, and the cases it was written for."""

    when: str
    holds: Callable[[Facts], bool]
    state: EngineState
    says: Callable[[Facts], str]
    cases: str


def _load(facts: Facts) -> str:
    """Say what is in flight: ``running 4, waiting 3``."""
    if not facts.told:
        return "running not shown"
    return f"running {facts.running:.0f}" + (f", waiting {facts.waiting:.0f}" if facts.waiting else "")


def _sockets(facts: Facts) -> str:
    """Say what the sockets show: ``4 open sockets``."""
    if facts.streams is None:
        return "sockets not known"
    counted = f"{facts.streams} open socket{'' if facts.streams == 1 else 's'}"
    return counted + (", bytes still flow" if facts.flowing and not facts.moved else "")


def _stands(facts: Facts) -> str:
    return f"{_load(facts)}, nothing moved for {facts.still:.1f} s, {_sockets(facts)}"


def _works(facts: Facts) -> str:
    if facts.moved:
        return f"{_load(facts)}, {facts.moved}"
    return f"{_stands(facts)} ({facts.quiet_until})"


def _fails(facts: Facts) -> str:
    lasting = f" for {facts.failing:.1f} s" if facts.failing else ""
    return f"{facts.error}{lasting}" + (", streams still carry bytes" if facts.flowing else "")


def _behind(facts: Facts) -> str:
    if facts.flowing:
        return f"{facts.error}: its page waits for the step in progress; bytes flow"
    budget = f"stuck from {facts.limits.prefill_budget:g} s"
    return (
        f"no page for {facts.silent:.1f} s, it waits for the step in progress ({budget}); had work, {_sockets(facts)}"
    )


def _rests(facts: Facts) -> str:
    known = "running 0, waiting 0" if facts.told else "running not shown"
    return known + ("" if facts.streams is None else f", {_sockets(facts)}")


def _began(facts: Facts) -> str:
    how = "a new process" if facts.anew else "the same process began its counters anew"
    return f"{how}, {facts.began or 0.0:.1f} s ago; {_load(facts)}"


TABLE: tuple[Row, ...] = (
    Row(
        "the connection to the page is refused",
        lambda f: f.refused,
        "dead",
        _fails,
        "an engine that ended (Fastllm-proxy 19); one that was never reached",
    ),
    Row(
        "the page does not come, which the engine makes between two steps, with work in flight; bytes flow, or prefill "
        "budget not spent",
        lambda f: f.behind and (f.flowing or f.silent < f.limits.prefill_budget),
        "busy",
        _behind,
        "llama.cpp in a long step",
    ),
    Row(
        "the same, prefill budget spent without a byte",
        lambda f: f.behind,
        "stuck",
        _behind,
        "llama.cpp, hung",
    ),
    Row(
        "no usable page: timeout, 5xx, empty, not an engine's",
        lambda f: f.page is None,
        "blind",
        _fails,
        "a page without the engine (8612, 7188), `--disable-log-stats`, a broken multi-process directory (49983)",
    ),
    Row(
        "reads come back to a set of counters they had left, within two windows",
        lambda f: f.mixed,
        "blind",
        lambda _: "several backends behind this address; check each directly, as an engine of its own",
        "a load balancer given as an engine",
    ),
    Row(
        "the sleep state is not awake",
        lambda f: f.page is not None and bool(f.page.asleep),
        "sleeping",
        lambda f: f"asleep by order, {_load(f)}",
        "`/sleep` (51487)",
    ),
    Row(
        "start time changed or counters fell, within one window and before the first progress",
        lambda f: f.began is not None,
        "restarted",
        _began,
        "up again after a crash (Fastllm-proxy 19); elastic scale-up resets counters in the same process",
    ),
    Row(
        "the engine says in flight, no open socket, no progress but steps without tokens within one window",
        lambda f: f.engine_has_work and f.streams == 0 and f.ghosts and not f.moved,
        "busy",
        lambda f: f"{_load(f)}, steps go on without tokens, no open socket: requests its front end has dropped",
        "lost abort: the core runs on",
    ),
    Row(
        "the engine says in flight, no open socket, no progress for one window",
        lambda f: f.engine_has_work and f.streams == 0 and f.quiet >= f.limits.window,
        "idle",
        lambda f: f"stale gauges: {_stands(f)}",
        "gauges frozen by a mass abort (22545, 29928)",
    ),
    Row(
        "requests wait for this engine alone, none runs, no progress for two windows",
        lambda f: f.queued > 0 and f.running == 0 and f.quiet >= f.patience and f.live,
        "stuck",
        _stands,
        "waiting and never scheduled (39863)",
    ),
    Row(
        "in flight, a prefill may be going on, no progress for two windows, prefill budget not spent",
        lambda f: f.in_flight and f.may_prefill and f.patience <= f.quiet < f.limits.prefill_budget,
        "busy",
        lambda f: f"{_stands(f)}: a prompt may be in the making ({f.quiet_until})",
        "an engine that shows nothing during a long prompt (51261, V0)",
    ),
    Row(
        "in flight, no progress for two windows on a page that moves only when a request ends; bytes flow",
        lambda f: f.in_flight and f.quiet >= f.patience and not f.live and f.flowing,
        "busy",
        lambda f: f"{_stands(f)}: its page moves only when a request ends",
        "TensorRT-LLM without iteration statistics",
    ),
    Row(
        "the same, and no bytes flow",
        lambda f: f.in_flight and f.quiet >= f.patience and not f.live,
        "blind",
        lambda f: f"{_stands(f)}: its page moves only when a request ends, which is no evidence of a hang",
        "the same",
    ),
    Row(
        "in flight, no progress for two windows",
        lambda f: f.in_flight and f.quiet >= f.patience,
        "stuck",
        _stands,
        "frozen in a CUDA wait (42897); 85 minutes of a dead backend (Fastllm-proxy 19)",
    ),
    Row(
        "in flight",
        lambda f: f.in_flight,
        "busy",
        _works,
        "slow but alive (llm-scaler 391); working for clients that left (litellm 30244); KV moves in a prefill (51261)",
    ),
    Row(
        "the page does not tell what is in flight, nor do the sockets",
        lambda f: not f.told and f.streams is None,
        "blind",
        lambda _: "the page shows neither running nor waiting requests",
        "a page cut short",
    ),
    Row(
        "none of these: nothing in flight",
        lambda _: True,
        "idle",
        _rests,
        "clients that closed (55634); steps that a V0 engine counts at rest",
    ),
)


def judge(
    state: VerdictState,
    *,
    at: float,
    reading: Reading[EnginePage],
    open_streams: int | None,
    open_flowing: bool,
    limits: Limits,
) -> tuple[VerdictState, Judgement]:
    """Judge the engine after one beat.

    ``at`` is now. ``open_streams`` are the streams in flight towards the engine by its sockets, None where these do not
    cover it or were not read; ``open_flowing`` says that any of them carried bytes since the last beat.
    """
    state, facts = _learn(state, at, reading, open_streams, open_flowing, limits)
    row = next(row for row in TABLE if row.holds(facts))
    working = row.state in ("busy", "stuck")
    return state, Judgement(
        state=row.state,
        evidence=row.says(facts),
        progress_age=max(0.0, at - state.moved_at) if working else None,
        restarts=state.restarts,
        ghost_steps=state.ghost_steps,
        moved=facts.moved,
        restarts_last_hour=sum(_within(restart, at, HOUR) for restart in state.restarted_at),
    )


def table() -> str:
    """Draw the table in Markdown."""
    rows = [f"| {n} | {row.when} | **{row.state}** | {row.cases} |" for n, row in enumerate(TABLE, 1)]
    return "\n".join(["| | when | verdict | written for |", "| --- | --- | --- | --- |", *rows])


def _learn(
    state: VerdictState, at: float, reading: Reading[EnginePage], streams: int | None, flowing: bool, limits: Limits
) -> tuple[VerdictState, Facts]:
    """Bring the memory forward by one reading, and say what the table may rest on."""
    page, moved = reading.value, ""
    if page is not None and _without_engine(page):
        page, error = None, "the page shows no value of the engine"
    else:
        error = reading.error or "no page"
    if page is None:
        failing_at = at if state.failing_at is None else state.failing_at
        # Without a start time only reads in a row can tell two backends from two lives of one.
        left = tuple(old for old in state.left if _identities(old.page, old.page))
        state = replace(state, failing_at=failing_at, refused=state.refused or reading.refused, left=left)
        state = _count_silence(state, at, limits, silent=reading.late and not flowing)
    else:
        state, moved = _compare(state, page, reading.at, streams, limits)
    now = at if page is None else reading.at
    return state, Facts(
        page=page,
        error=error,
        refused=reading.refused,
        failing=0.0 if state.failing_at is None else at - state.failing_at,
        behind=reading.late and _is_behind(state, streams),
        silent=state.silent,
        streams=streams,
        flowing=flowing,
        moved=moved,
        quiet=state.quiet,
        still=max(0.0, now - state.moved_at),
        prefilling=state.prefilling,
        ghosts=_within(state.ghost_at, now, limits.window),
        began=now - state.began_at if state.began_at is not None else None,
        anew=state.began_anew,
        mixed=_within(state.mixed_at, now, WINDOWS * limits.window),
        limits=limits,
    )


def _count_silence(state: VerdictState, at: float, limits: Limits, *, silent: bool) -> VerdictState:
    """Note for how long the page has not come and nothing else was heard; a suspended host makes one pause."""
    if not silent:
        return replace(state, silent=0.0, silent_at=None)
    since = at if state.silent_at is None else state.silent_at
    return replace(state, silent=state.silent + min(max(0.0, at - since), limits.window), silent_at=at)


def _is_behind(state: VerdictState, streams: int | None) -> bool:
    """Tell whether the page may be waiting for a step of the engine: it makes it so, and has or had work."""
    made_between_steps = state.page is not None and state.page.between_steps
    return made_between_steps and (state.in_flight or bool(streams))


def _compare(
    state: VerdictState, page: EnginePage, at: float, streams: int | None, limits: Limits
) -> tuple[VerdictState, str]:
    """Compare a page with the one before; return the memory after it, and what progressed, in words."""
    last, dt = state.page, max(0.0, at - state.page_at)
    in_flight = (page.requests > 0 or bool(streams)) and not page.asleep
    # Where the pages do not say which process made them, one that was refused in between is taken for another.
    same = last is not None and _continues(page, last) and (not state.refused or _identities(page, last) is not None)
    state = _follow_counters(state, page, at, same=same, limits=limits)
    moved, ghosts = "", 0.0
    if last is not None and same:
        moved = _progress(last, page, dt)
        ghosts = _ghost_steps(last, page, streams)
        page = _filled(page, last)
    still = same and not moved and in_flight and state.in_flight
    expired = state.began_at is not None and at - state.began_at >= limits.window
    return replace(
        state,
        page=page,
        page_at=at,
        in_flight=in_flight,
        # A suspended host, or a source that failed for minutes, makes one pause, not many.
        quiet=state.quiet + min(dt, limits.window) if still else 0.0,
        moved_at=state.moved_at if still else at,
        prefilling=_may_prefill(state.prefilling and (same or last is None), last if same else None, page),
        began_at=None if moved or expired else state.began_at,
        refused=False,
        failing_at=None,
        silent=0.0,
        silent_at=None,
        ghost_steps=state.ghost_steps + ghosts,
        ghost_at=at if ghosts else state.ghost_at,
    ), moved


def _follow_counters(state: VerdictState, page: EnginePage, at: float, *, same: bool, limits: Limits) -> VerdictState:
    """Note whether the page goes on with the counters of the last one, begins anew, or belongs to another backend.

    A process never gets back the counters of one that ran before it. So reads that return to a set they had left come
    from several backends behind one address. With start times on the pages that is plain. Without, a page of the
    *larger* set looks like growth of the smaller; it shows when the reads fall back a second time, onto the smaller.
    """
    recent = WINDOWS * limits.window
    left = tuple(old for old in state.left if _identities(old.page, old.page) or at - old.at <= recent)
    last = state.page
    if last is None:
        return replace(state, left=left)
    if same:
        overtakes = any(_continues(page, old.page) and not _continues(last, old.page) for old in left)
        if overtakes and _identities(page, last) is None:
            left = (*left, Left(last, at))[-MAX_LEFT:]
        return replace(state, left=left)

    if last.start_time is not None and last.start_time == page.start_time:
        # The same process: elastic scale-up makes its counters anew.
        return replace(state, left=left, began_at=at, began_anew=False)
    known = [old for old in left if _continues(page, old.page)]
    left = (*(old for old in left if old not in known), Left(last, at))[-MAX_LEFT:]
    if known or _within(state.mixed_at, at, recent):
        return replace(state, left=left, mixed_at=at, began_at=None)
    recent_restarts = (*(restart for restart in state.restarted_at if _within(restart, at, HOUR)), at)[-MAX_RESTARTS:]
    return replace(
        state,
        left=left,
        began_at=at,
        began_anew=True,
        restarts=state.restarts + 1,
        restarted_at=recent_restarts,
    )


def _identities(page: EnginePage, last: EnginePage) -> tuple[float, float] | None:
    """Return what tells the processes behind two pages apart; None where the pages do not say.

    That is their start time, absent with several API servers, V0 and the Rust front end. The counters' creation time
    stands in for it, but only then: a new label, and a reset, make it newer.
    """
    for mine, before in ((page.start_time, last.start_time), (page.created, last.created)):
        if mine is not None and before is not None:
            return mine, before
    return None


def _continues(page: EnginePage, last: EnginePage) -> bool:
    """Tell whether a page may be a later one of the process that made ``last``: not another start, no counter fell."""
    identities = _identities(page, last)
    if identities is not None and identities[0] != identities[1]:
        return False
    return all((_delta(page, last, name) or 0.0) >= 0 for name in _COUNTERS)


def _delta(page: EnginePage, last: EnginePage, name: str) -> float | None:
    now: float | None = getattr(page, name)
    before: float | None = getattr(last, name)
    return None if now is None or before is None else now - before


def _progress(last: EnginePage, page: EnginePage, dt: float) -> str:
    """Say the first thing that progressed: ``generation +107 in 10.0 s``."""
    for name, word in _PROGRESS.items():
        delta = _delta(page, last, name)
        if delta is not None and delta > 0:
            return f"{word} +{delta:.0f} in {dt:.1f} s"
    if page.kv_usage is not None and last.kv_usage is not None and page.kv_usage != last.kv_usage:
        return f"KV usage {last.kv_usage:.2%} to {page.kv_usage:.2%} in {dt:.1f} s"
    return ""


def _ghost_steps(last: EnginePage, page: EnginePage, streams: int | None) -> float:
    """Count steps that brought no token while more ran than has an open socket."""
    steps = _delta(page, last, "steps") or 0.0
    flat = _delta(page, last, "step_tokens") == 0 and _delta(page, last, "generation_tokens") == 0
    unseen = streams is not None and page.running is not None and page.running > streams
    return steps if flat and unseen else 0.0


def _may_prefill(before: bool, last: EnginePage | None, page: EnginePage) -> bool:
    """Tell whether a running request may be without its first token.

    vLLM adds a prompt to ``prompt_tokens`` when its first token comes, others count first tokens; so a start
    (``finished + running`` rose) that no growth of these followed is a prefill. Where both came between the same two
    reads the prompt is taken to be the started one's. An engine that has made no token since it began, and runs
    something, is in its first prefill.
    """
    if not page.running:
        return False
    if not (page.generation_tokens or page.prompt_tokens or page.first_tokens):
        return True
    if last is None:
        return before
    if any((_delta(page, last, name) or 0.0) > 0 for name in ("prompt_tokens", "first_tokens")):
        return False
    return before or (_delta(page, last, "finished") or 0.0) + page.running - (last.running or 0.0) > 0


def _filled(page: EnginePage, last: EnginePage) -> EnginePage:
    """Fill what a page lacks (a line was cut) from the one before, so that the next is compared with something."""
    names = [*_COUNTERS, "kv_usage", "start_time", "created"]
    known = {name: getattr(last, name) for name in names if getattr(page, name) is None}
    return replace(page, **known) if known else page


def _without_engine(page: EnginePage) -> bool:
    """Tell whether nothing on the page speaks of the engine: the process metrics alone do not."""
    return all(getattr(page, name) is None for name in ("running", "waiting", "asleep", "kv_usage", *_COUNTERS))


def _within(since: float | None, now: float, seconds: float) -> bool:
    return since is not None and now - since < seconds
