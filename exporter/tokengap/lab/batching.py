"""Continuous batching as vLLM does it, without a model: who runs, who waits, and who gets a token when.

No clock and no I/O: every call says what time it is, so tests run it in virtual time. All times are monotonic seconds.

The rules, and where the stand-in is simpler than vLLM:

- A request waits in one FIFO queue until one of ``max_num_seqs`` slots is free.
- It then prefills for prompt tokens / ``prefill_rate`` seconds, by itself (vLLM shares a token budget among prompts).
- Steps come every 1 / ``rate`` seconds; in one step each decoding sequence gets one token. A sequence whose prefill is
  over joins the next step. Late calls catch up, at the times at which the steps were due.
- Counters grow as in vLLM 0.33: a prompt counts as a whole with the first token, generation with every step, a step
  without output is no iteration, per-request series only on finish, and a request that was aborted is in none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokengap.lab.vllm_page import BLOCK_TOKENS, BLOCKS, VllmPage

State = Literal["queued", "running", "finished", "aborted"]

#: An engine that was itself stopped (SIGSTOP, a starved host) did not compute meanwhile: it catches up this much, s.
MOST_CATCH_UP = 1.0


@dataclass(frozen=True, slots=True)
class Knobs:
    """What can be turned on a stand-in engine, also while it runs.

    ``rate``: tokens a second of each running sequence. ``prefill_rate``: prompt tokens a second. ``answer_tokens``: how
    long an answer is that asks for no ``max_tokens`` (it then ends with ``stop``). ``ignore_disconnects``: an engine
    that leaks: a request whose client left runs to its end. ``late_headers``: the response header of a stream comes
    with its first token; vLLM sends it at once, before the request has even been scheduled. ``disable_log_stats``: no
    family of vLLM is on the page, as with vLLM's flag of that name.
    """

    max_num_seqs: int = 4
    rate: float = 50.0
    prefill_rate: float = 8000.0
    answer_tokens: int = 256
    ignore_disconnects: bool = False
    late_headers: bool = False
    disable_log_stats: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "rate", "prefill_rate", "answer_tokens"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0")


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine. ``limit`` is where it ends; ``max_tokens`` is None when the client gave none."""

    id: str
    prompt_tokens: int
    limit: int
    arrived: float
    max_tokens: int | None = None
    state: State = "queued"
    started: float | None = None
    prefilled: float = 0.0  # when its prefill is over; counts once started
    first_token: float | None = None
    ended: float | None = None
    generated: int = 0
    written: int = 0  # tokens handed to the client's socket
    abandoned: bool = False  # its client left and the engine went on

    @property
    def reason(self) -> Literal["stop", "length"] | None:
        """Why it finished, in vLLM's words; None while it has not."""
        if self.state != "finished":
            return None
        return "stop" if self.max_tokens is None else "length"


class Batch:
    """The scheduler of one engine. It writes to ``page`` and to the sequences, and calls nobody."""

    def __init__(self, knobs: Knobs, page: VllmPage) -> None:
        self.knobs = knobs
        self.generated = 0
        self._page = page
        # Dictionaries used as ordered sets: a client may leave from the middle of a queue of thousands.
        self._queue: dict[Sequence, None] = {}
        self._prefilling: dict[Sequence, None] = {}
        self._decoding: dict[Sequence, None] = {}
        self._decoding_tokens = 0  # prompt and generated tokens that decoding sequences keep in the KV cache
        self._last_step = float("-inf")
        self._frozen_at: float | None = None

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._queue)

    @property
    def frozen(self) -> bool:
        """Whether stepping is stopped."""
        return self._frozen_at is not None

    def head_age(self, now: float) -> float:
        """Return how long the head of the queue has waited, 0 when nobody waits."""
        head = next(iter(self._queue), None)
        return 0.0 if head is None else now - head.arrived

    def first_token_wait(self, now: float) -> float:
        """Return the longest wait of those that have no token yet, queued or in prefill; 0 when there are none."""
        heads = [next(iter(self._queue), None), *self._prefilling]
        return max((now - sequence.arrived for sequence in heads if sequence is not None), default=0.0)

    def submit(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence; it starts at once when a slot is free."""
        self._queue[sequence] = None
        self._fill(now)
        self.show(now)

    def abort(self, sequence: Sequence, now: float) -> None:
        """Drop a sequence wherever it is and give its slot to the next. What ended stays as it ended."""
        if sequence.ended is not None:
            return
        if sequence in self._decoding:
            self._decoding_tokens -= sequence.prompt_tokens + sequence.generated
        for place in (self._queue, self._prefilling, self._decoding):
            place.pop(sequence, None)
        sequence.state, sequence.ended = "aborted", now
        self._fill(now)
        self.show(now)

    def turn(self, knobs: Knobs, now: float) -> None:
        """Take new knobs. A prefill under way keeps its end."""
        self.knobs = knobs
        self._fill(now)
        self.show(now)

    def freeze(self, now: float) -> None:
        """Stop stepping: nothing is generated or scheduled, and the page keeps its values."""
        self._frozen_at = self._frozen_at or now

    def thaw(self, now: float) -> None:
        """Step on from here. The frozen time was not computed in, and prefills last that much longer."""
        if self._frozen_at is None:
            return
        for sequence in self._prefilling:
            sequence.prefilled += now - self._frozen_at
        self._last_step = max(self._last_step, now - 1 / self.knobs.rate)
        self._frozen_at = None
        self._fill(now)
        self.show(now)

    def due(self) -> float | None:
        """Return when :meth:`advance` has something to do next; None while nothing runs."""
        if self.frozen:
            return None
        next_step = self._last_step + 1 / self.knobs.rate
        if self._decoding:
            return next_step
        if self._prefilling:
            return max(next_step, min(sequence.prefilled for sequence in self._prefilling))
        return None

    def advance(self, now: float) -> list[Sequence]:
        """Take every step that is due, and return the sequences that got tokens, each once."""
        got: dict[Sequence, None] = {}
        while (due := self.due()) is not None and due <= now:
            got |= dict.fromkeys(self._step(max(due, now - MOST_CATCH_UP)))
        if got:
            self.show(now)
        return list(got)

    def show(self, now: float) -> None:
        """Put the gauges on the page. A frozen engine shows what it last showed."""
        if self.frozen:
            return
        prefilled = sum(
            sequence.prompt_tokens * min(1.0, self._prefill_share(sequence, now)) for sequence in self._prefilling
        )
        used = (self._decoding_tokens + prefilled) / (BLOCK_TOKENS * BLOCKS)
        self._page.put("num_requests_running", self.running)
        self._page.put("num_requests_waiting", self.waiting)
        self._page.put("num_requests_waiting_by_reason", self.waiting, "capacity")
        self._page.put("kv_cache_usage_perc", min(1.0, used))

    @staticmethod
    def _prefill_share(sequence: Sequence, now: float) -> float:
        started = sequence.started or 0.0
        return (now - started) / max(1e-9, sequence.prefilled - started)

    def _fill(self, now: float) -> None:
        """Give free slots to the head of the queue."""
        while not self.frozen and self._queue and self.running < self.knobs.max_num_seqs:
            sequence = next(iter(self._queue))
            del self._queue[sequence]
            # A step that is caught up may lie before the arrival of one who came meanwhile.
            sequence.started = max(now, sequence.arrived)
            sequence.prefilled = sequence.started + sequence.prompt_tokens / self.knobs.prefill_rate
            sequence.state = "running"
            self._prefilling[sequence] = None

    def _step(self, at: float) -> list[Sequence]:
        """One engine step: a token for each sequence whose prefill is over."""
        old = len(self._decoding)
        prompt_tokens = 0
        for sequence in [sequence for sequence in self._prefilling if sequence.prefilled <= at]:
            del self._prefilling[sequence]
            self._decoding[sequence] = None
            self._decoding_tokens += sequence.prompt_tokens
            sequence.first_token = at
            prompt_tokens += sequence.prompt_tokens
            self._page.observe("time_to_first_token_seconds", at - sequence.arrived)
        got = list(self._decoding)
        for sequence in got:
            sequence.generated += 1
            if sequence.generated >= sequence.limit:
                self._finish(sequence, at)
        self.generated += len(got)
        self._decoding_tokens += sum(sequence.ended is None for sequence in got)
        self._page.add("generation_tokens", len(got))
        self._page.observe("iteration_tokens_total", len(got) + prompt_tokens)
        self._page.observe("inter_token_latency_seconds", at - self._last_step, times=old)
        if prompt_tokens:
            self._page.add("prompt_tokens", prompt_tokens)
            self._page.add("prompt_tokens_by_source", prompt_tokens, "local_compute")
        self._last_step = at
        self._fill(at)
        return got

    def _finish(self, sequence: Sequence, at: float) -> None:
        del self._decoding[sequence]
        self._decoding_tokens -= sequence.prompt_tokens + sequence.generated - 1
        sequence.state, sequence.ended = "finished", at
        assert sequence.started is not None
        assert sequence.first_token is not None
        assert sequence.reason is not None
        decode = at - sequence.first_token
        self._page.add("request_success", 1, sequence.reason)
        for name, value in (
            ("request_prompt_tokens", sequence.prompt_tokens),
            ("request_generation_tokens", sequence.generated),
            ("request_max_num_generation_tokens", sequence.generated),
            ("request_params_n", 1),
            ("request_params_max_tokens", sequence.limit),
            ("request_num_preemptions", 0),
            ("request_prefill_kv_computed_tokens", sequence.prompt_tokens),
            ("e2e_request_latency_seconds", at - sequence.arrived),
            ("request_queue_time_seconds", sequence.started - sequence.arrived),
            ("request_inference_time_seconds", at - sequence.started),
            ("request_prefill_time_seconds", sequence.first_token - sequence.started),
            ("request_decode_time_seconds", decode),
            ("request_time_per_output_token_seconds", decode / max(1, sequence.generated - 1)),
        ):
            self._page.observe(name, value)
