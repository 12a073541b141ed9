"""The engine: requests in, token events out, one step at a time. No I/O, no threads of its own.

A step is a transaction: the scheduler plans it and reserves blocks, the runners run it, and only then are
tokens and computed K/V committed. Until the commit nothing but reserved slots has changed, so whatever fails
is simply not committed. When a forward pass fails, its sequences are run one by one, and only those that fail
alone end with an error.

All methods belong to one thread, between steps.
"""

import logging
import math
import time
from array import array
from collections.abc import Sequence as Items

import psutil

from cascade.answer import Answer
from cascade.block_pool import BlockPool, PoolInvariantError
from cascade.choice import Chooser
from cascade.config import EngineConfig
from cascade.detokenizer import Detokenizer
from cascade.prefix_cache import PrefixCache
from cascade.protocol import EngineStats, FinishReason, GenerateRequest, Rejected, TierInfo, TokenEvent
from cascade.runner import Rows, Runner, TierModel
from cascade.scheduler import Scheduler
from cascade.sequence import Sequence, block_tables
from cascade.session import load_tiers
from cascade.speculation import AdaptiveDraftLength
from cascade.step import Outcome, StepRunner
from cascade.validation import refusal

log = logging.getLogger("stepwell.engine")

WARM_UP_TOKENS = (64, 1)
"""Row counts of the warm-up passes: one prompt chunk, one decode."""


class Engine:
    """All tiers of one device. Loading reads the bundles and warms the sessions up."""

    def __init__(self, config: EngineConfig, models: Items[TierModel] | None = None) -> None:
        """`models` None: the sessions of the configured bundles. Raises BundleError."""
        loaded: Items[TierModel] = load_tiers(config) if models is None else models
        self._config = config
        self._models = {model.name: model for model in loaded}
        self.tiers = [
            TierInfo(m.name, m.bundle_dir, m.fingerprint, m.context_length, m.vocab_size, list(m.eos_ids))
            for m in loaded
        ]
        self._vocabularies = {m.name: hash((m.vocab_size, frozenset(m.tokenizer.get_vocab().items()))) for m in loaded}
        self._runners = {m.name: Runner(m, config.max_batch_tokens, config.max_sequences) for m in loaded}
        self._drafts = AdaptiveDraftLength(config.draft_tokens)
        self._scheduler = Scheduler(
            self._new_caches(),
            self._drafts,
            max_batch_tokens=config.max_batch_tokens,
            max_sequences=config.max_sequences,
            interleaved_prefill_tokens=config.interleaved_prefill_tokens,
        )
        self._answers: dict[str, Answer] = {}
        self._choosers: dict[int, Chooser] = {}
        self._step_runner = StepRunner(self._runners, self._choosers)
        self._events: list[TokenEvent] = []
        self._arrivals = 0
        self._steps = self._prompt_tokens = self._generated = self._drafted = self._accepted = 0
        self._finish_interval_s = 1.0
        self._last_finish = time.monotonic()
        if config.warm_up:
            self._warm_up()

    # Requests

    def submit(self, request: GenerateRequest) -> Rejected | None:
        """Queue a request, or say why not."""
        if request.request_id in self._answers:
            return Rejected(request.request_id, "invalid", f"request id {request.request_id!r} is in use")
        pools = {name: cache.pool for name, cache in self._scheduler.caches.items()}
        if rejected := refusal(request, self._models, pools, self._vocabularies):
            return rejected
        if len(self._scheduler.waiting) >= self._config.max_waiting:
            message = f"{len(self._scheduler.waiting)} requests wait already, the limit is {self._config.max_waiting}"
            return Rejected(request.request_id, "queue_full", message, self._retry_after_s())
        plan = request.plan
        tiers = [plan.tier] if plan.mode == "direct" or plan.draft is None else [plan.tier, plan.draft]
        hashers = {tier: self._scheduler.caches[tier].hasher(plan.cache_salt) for tier in tiers}
        sequence = Sequence(request, self._arrivals, hashers)
        self._arrivals += 1
        model = self._models[plan.tier]
        self._choosers[sequence.arrival] = Chooser(sequence, model.eos_ids)
        detokenizer = Detokenizer(model.token_table, request.sampling.stop)
        self._answers[request.request_id] = Answer(sequence, detokenizer, model.eos_ids)
        self._scheduler.add(sequence)
        return None

    def cancel(self, request_id: str) -> None:
        """End a request now and return its blocks; its last event comes from the next `step`."""
        if answer := self._answers.get(request_id):
            self._events.append(self._end(answer, "cancelled"))

    def pause(self, request_id: str) -> None:
        """Do not schedule the request until `resume`; it keeps its blocks unless others need them."""
        if answer := self._answers.get(request_id):
            answer.sequence.paused = True

    def resume(self, request_id: str) -> None:
        """Undo `pause`."""
        if answer := self._answers.get(request_id):
            answer.sequence.paused = False

    # The loop

    def has_work(self) -> bool:
        """True when `step` would do something."""
        return bool(self._events) or self._scheduler.has_work()

    def step(self) -> list[TokenEvent]:
        """Run one step if there is work; the events that it caused, [] when idle."""
        events, self._events = self._events, []
        if self._scheduler.has_work():
            try:
                for outcome in self._step_runner.execute(self._scheduler.plan()):
                    if event := self._commit(outcome):
                        events.append(event)
                self._steps += 1
            except Exception:
                log.exception("a step failed outside any request's own part; all requests end")
                events += self._fail_all("the engine failed in this step")
        if events and not self._answers:
            self._check_idle()
        return events

    def _commit(self, outcome: Outcome) -> TokenEvent | None:
        sequence = outcome.sequence
        answer = self._answers[sequence.request_id]
        if outcome.error is not None:
            return self._end(answer, "error", outcome.error)
        first_token = sequence.num_generated == 0
        sequence.drafted_tokens += outcome.drafted
        sequence.accepted_tokens += outcome.accepted
        sequence.round_left = outcome.round_left
        if outcome.drafted:
            self._drafts.after_verify(
                sequence,
                outcome.accepted,
                refused=outcome.accepted < outcome.drafted,
                round_over=outcome.round_left is None,
            )
        self._drafted += outcome.drafted
        self._accepted += outcome.accepted
        event: TokenEvent | None = None
        if outcome.tokens:
            try:
                event = answer.extend(outcome.tokens)
            except Exception as error:
                log.exception("request %s failed while turning tokens into text", sequence.request_id)
                return self._end(answer, "error", f"detokenizing failed: {error}")
            self._choosers[sequence.arrival].advance(token.id for token in event.tokens)
            self._generated += len(event.tokens)
            self._prompt_tokens += sequence.prompt_length if first_token else 0
        for tier, computed in outcome.computed.items():
            sequence.commit(tier, computed, self._scheduler.caches[tier])
        if answer.finished:
            self._forget(answer)
        return event

    # Endings

    def _end(self, answer: Answer, reason: FinishReason, error: str | None = None) -> TokenEvent:
        self._forget(answer)
        return answer.end(reason, error)

    def _forget(self, answer: Answer) -> None:
        sequence = answer.sequence
        self._scheduler.remove(sequence)
        del self._answers[sequence.request_id]
        del self._choosers[sequence.arrival]
        now = time.monotonic()
        self._finish_interval_s += 0.2 * (min(now - self._last_finish, 60.0) - self._finish_interval_s)
        self._last_finish = now

    def _fail_all(self, message: str) -> list[TokenEvent]:
        """The engine's own state is in doubt: end every request and start with empty pools."""
        events = [answer.end("error", message) for answer in self._answers.values()]
        self._answers.clear()
        self._choosers.clear()
        self._scheduler.reset(self._new_caches())
        return events

    def _retry_after_s(self) -> int:
        """Seconds until about a quarter of the queue has been served at the recent rate."""
        return max(1, min(60, math.ceil(self._finish_interval_s * len(self._scheduler.waiting) / 4)))

    # State

    def stats(self) -> EngineStats:
        """Gauges and counters; `tasks` is the server's to fill in."""
        pools = {name: cache.pool for name, cache in self._scheduler.caches.items()}
        return EngineStats(
            waiting=len(self._scheduler.waiting),
            running=len(self._scheduler.running),
            blocks_total={name: pool.num_blocks for name, pool in pools.items()},
            blocks_free={name: pool.num_free for name, pool in pools.items()},
            blocks_cached={name: pool.num_cached for name, pool in pools.items()},
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            prefix_hit_tokens=self._scheduler.prefix_hit_tokens,
            generated_tokens=self._generated,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            preemptions=self._scheduler.preemptions,
            tasks=0,
            rss_bytes=psutil.Process().memory_info().rss,
        )

    def check_invariants(self) -> None:
        """Compare pools, prefix caches and block tables; raises PoolInvariantError."""
        for tier, cache in self._scheduler.caches.items():
            cache.pool.check(block_tables(self._scheduler.sequences(), tier))
            cache.check()

    def _check_idle(self) -> None:
        """Idle: every block must be free. If not, say so and start with empty pools rather than leak on."""
        try:
            self.check_invariants()
        except PoolInvariantError:
            log.critical("K/V accounting is wrong in an idle engine; pools are rebuilt", exc_info=True)
            self._scheduler.reset(self._new_caches())

    def _new_caches(self) -> dict[str, PrefixCache]:
        return {
            name: PrefixCache(BlockPool(model.num_blocks, model.block_size), model.fingerprint)
            for name, model in self._models.items()
        }

    def _warm_up(self) -> None:
        """Run each graph once per shape class, so that no request pays for page faults and lazy set-up."""
        for name, runner in self._runners.items():
            pool = self._scheduler.caches[name].pool
            table = pool.allocate(min(pool.num_blocks, pool.blocks_for(max(WARM_UP_TOKENS))))
            room = min(len(table) * pool.block_size, self._config.max_batch_tokens, self._models[name].context_length)
            for count in WARM_UP_TOKENS:
                runner.run([Rows([0] * min(count, room), 0, array("i", table), 1)])
            pool.release(table)
