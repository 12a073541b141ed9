"""How many tokens one sequence may have: its context, or what the K/V pools hold where that is less."""

from cascade.protocol import Plan
from gateway.engine import EngineHandle
from gateway.prompts import TierText


class Capacity:
    """Remembers the pools' sizes for as long as one engine process lives."""

    def __init__(self, engine: EngineHandle, texts: dict[str, TierText]) -> None:
        self._engine = engine
        self._texts = texts
        self._pools: dict[str, int] = {}
        self._restarts = -1

    async def tokens(self, plan: Plan) -> int:
        """Prompt and answer together must not be longer than this. Raises EngineUnavailableError."""
        if self._restarts != self._engine.restarts:
            restarts = self._engine.restarts
            blocks = (await self._engine.stats()).blocks_total
            self._pools = {tier: count * self._texts[tier].block_size for tier, count in blocks.items()}
            self._restarts = restarts
        tiers = [plan.tier] if plan.draft is None else [plan.tier, plan.draft]
        return min(min(self._texts[tier].context_length, self._pools[tier]) for tier in tiers)
