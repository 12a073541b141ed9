"""What is refused at submit, with the numbers that say why. Pure functions."""

from cascade.block_pool import BlockPool
from cascade.protocol import GenerateRequest, Rejected
from cascade.runner import TierModel


def refusal(
    request: GenerateRequest, models: dict[str, TierModel], pools: dict[str, BlockPool], vocabularies: dict[str, int]
) -> Rejected | None:
    """Why this request can never run, or None. `vocabularies` tells tiers with equal tokenizers by equal values."""
    plan = request.plan
    tiers = [plan.tier] if plan.mode == "direct" else [plan.tier, plan.draft or ""]
    for tier in tiers:
        if tier not in models:
            return Rejected(request.request_id, "unknown_tier", f"no tier {tier!r}; loaded: {', '.join(models)}")
    if len(set(tiers)) < len(tiers):
        return _invalid(request, f"tier {plan.tier!r} cannot draft for itself")
    if len({vocabularies[tier] for tier in tiers}) > 1:
        return _invalid(request, f"tiers {plan.draft!r} and {plan.tier!r} have different vocabularies")
    if problem := _bad_field(request, models[plan.tier].vocab_size):
        return _invalid(request, problem)
    prompt, extra = len(request.prompt_ids), request.sampling.max_tokens
    sizes = f"prompt of {prompt} tokens plus max_tokens {extra} is {prompt + extra}"
    for tier in tiers:
        if prompt + extra > (limit := models[tier].context_length):
            return _overflow(request, f"{sizes}; the context of tier {tier} is {limit} tokens")
        if pools[tier].blocks_for(prompt + extra) > pools[tier].num_blocks:
            limit = pools[tier].num_blocks * pools[tier].block_size
            return _overflow(request, f"{sizes}; the K/V pool of tier {tier} holds {limit} tokens")
    return None


def _bad_field(request: GenerateRequest, vocab_size: int) -> str | None:
    sampling = request.sampling
    if not request.prompt_ids:
        return "the prompt has no tokens"
    if sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens}, must be at least 1"
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        return f"min_tokens is {sampling.min_tokens}, must be 0 to max_tokens {sampling.max_tokens}"
    for field, ids in (
        ("prompt", request.prompt_ids),
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", list(sampling.logit_bias)),
    ):
        if ids and not (0 <= min(ids) and max(ids) < vocab_size):
            wrong = next(i for i in ids if not 0 <= i < vocab_size)
            return f"{field}: token id {wrong} is outside the vocabulary of {vocab_size}"
    return None


def _invalid(request: GenerateRequest, message: str) -> Rejected:
    return Rejected(request.request_id, "invalid", message)


def _overflow(request: GenerateRequest, message: str) -> Rejected:
    return Rejected(request.request_id, "context_overflow", message)
