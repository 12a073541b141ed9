"""The vocabulary between gateway and engine: messages, declared once, sent as msgpack over a Unix socket.

Framing: a 4-byte little-endian length, then one msgpack map with a `type` tag. A frame over
`MAX_FRAME_BYTES` closes the connection. The client speaks first with `Hello`; the engine answers
`Welcome`. After that both sides send any message at any time; `request_id` multiplexes.
"""

from typing import Literal

import msgspec

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 64 << 20

Mode = Literal["direct", "speculate"]
FinishReason = Literal["stop", "length", "cancelled", "error"]
TokenFate = Literal["decoded", "accepted", "corrected", "bonus"]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to choose tokens. The order of application is the order of the fields from `logit_bias` to `min_p`.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `seed` None means a random one is drawn
    by the gateway before the plan is sent, so that the engine itself is deterministic.
    """

    logit_bias: dict[int, float] = {}
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    """None: none. 0: the chosen token's only. n: the n most likely as well (at most 20)."""
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int = 16


class Plan(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the router decided: which tiers, in which mode, by which rule."""

    mode: Mode
    tier: str
    """The tier that answers (`direct`) or verifies (`speculate`)."""
    draft: str | None = None
    """The drafting tier in mode `speculate`."""
    policy: str = "default"
    length_class: Literal["short", "medium", "long"] = "medium"
    use_prefix_cache: bool = True
    cache_salt: str = ""
    """The tenant's salt: mixed into every block hash."""


class GenerateRequest(msgspec.Struct, tag="generate"):
    """client -> engine: start one sequence. The prompt is tokens already; the gateway owns templates."""

    request_id: str
    prompt_ids: list[int]
    plan: Plan
    sampling: SamplingParams


class Cancel(msgspec.Struct, tag="cancel"):
    """client -> engine: stop now, return every block. Unknown ids are ignored."""

    request_id: str


class Credit(msgspec.Struct, tag="credit"):
    """client -> engine: `n` more `TokenEvent`s of this request may be sent (back-pressure).

    A request starts with `INITIAL_CREDIT`. Without credit its sequence keeps its blocks and is not scheduled.
    """

    request_id: str
    n: int


INITIAL_CREDIT = 256


class Hello(msgspec.Struct, tag="hello"):
    """client -> engine, first frame."""

    version: int


class StatsRequest(msgspec.Struct, tag="stats_request"):
    """client -> engine: answered by one `EngineStats`."""


class TierInfo(msgspec.Struct):
    """What the gateway needs to know about a loaded tier."""

    name: str
    bundle_dir: str
    fingerprint: str
    context_length: int
    vocab_size: int
    eos_ids: list[int]


class Welcome(msgspec.Struct, tag="welcome"):
    """engine -> client, once every tier is loaded and warm."""

    version: int
    tiers: list[TierInfo]
    isa: str


class TokenLogprob(msgspec.Struct):
    """One candidate: token id and its natural-log probability after bias and penalties, at temperature 1."""

    id: int
    logprob: float


class Token(msgspec.Struct):
    """One emitted token with where it came from."""

    id: int
    tier: str
    fate: TokenFate
    logprob: float | None = None
    top: list[TokenLogprob] | None = None


class TokenEvent(msgspec.Struct, tag="tokens"):
    """engine -> client: the tokens of one step (one without speculation) and the text they settled.

    `text` is what detokenization can release: never half a UTF-8 character, never a possible beginning
    of a stop string. Concatenated over all events it is the whole answer. On the last event
    `finish_reason` is set and nothing of this request follows.
    """

    request_id: str
    tokens: list[Token]
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the answer."""
    usage: "Usage | None" = None
    """On the last event."""


class Usage(msgspec.Struct):
    """Counts of one finished request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Rejected(msgspec.Struct, tag="rejected"):
    """engine -> client: the request was not admitted. `code` picks the error class in the client."""

    request_id: str
    code: Literal["invalid", "context_overflow", "unknown_tier", "queue_full"]
    message: str
    retry_after_s: int = 1


class EngineStats(msgspec.Struct, tag="stats"):
    """engine -> client: gauges and monotonic counters for metrics and leak checks."""

    waiting: int
    running: int
    blocks_total: dict[str, int]
    """Per tier, as every dict here."""
    blocks_free: dict[str, int]
    """Free to allocate, counting cached blocks that no sequence references."""
    blocks_cached: dict[str, int]
    steps: int
    prompt_tokens: int
    prefix_hit_tokens: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    preemptions: int
    tasks: int
    """asyncio tasks alive in the engine process."""
    rss_bytes: int


ClientMessage = Hello | GenerateRequest | Cancel | Credit | StatsRequest
EngineMessage = Welcome | TokenEvent | Rejected | EngineStats
