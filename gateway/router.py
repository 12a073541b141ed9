"""Request -> `Plan`: which tiers answer a model name, and in which mode. Pure functions of the configuration."""

from dataclasses import dataclass
from typing import Literal

from cascade.errors import UnknownModelError
from cascade.protocol import Plan
from gateway.config import AUTO_MODEL, Config, Policy, is_path, suggest

SHORT_TOKENS = 128
MEDIUM_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Prompt:
    """What routing may look at. `max_tokens` None: the client set no limit."""

    max_tokens: int | None = None


class Router:
    """Knows the model names and answers each with a plan."""

    def __init__(self, config: Config) -> None:
        self._config = config
        bundles = [spec.bundle for spec in config.tiers.values()]
        # A tier also answers to its bundle's name where only one tier uses it.
        self._aliases = {
            spec.bundle: tier
            for tier, spec in config.tiers.items()
            if not is_path(spec.bundle) and bundles.count(spec.bundle) == 1 and spec.bundle not in config.tiers
        }

    def models(self) -> list[str]:
        """The names that clients see, `auto` first."""
        return [AUTO_MODEL, *self._config.tiers]

    def resolve(self, model: str) -> str:
        """`auto` or a tier's name. Raises UnknownModelError with the nearest name."""
        if model == AUTO_MODEL or model in self._config.tiers:
            return model
        if model in self._aliases:
            return self._aliases[model]
        shown = model[:96]
        known = [*self.models(), *self._aliases]
        raise UnknownModelError(f"The model {shown!r} does not exist{suggest(shown, known)}")

    def plan(self, model: str, prompt: Prompt) -> Plan:
        """The plan for a request. Raises UnknownModelError."""
        name = self.resolve(model)
        length_class = classify_length(prompt)
        if name != AUTO_MODEL:
            return Plan(mode="direct", tier=name, policy=f"model:{name}", length_class=length_class)
        policy = self._first_match()
        if policy.route.speculate is not None:
            pair = policy.route.speculate
            return Plan(
                mode="speculate", tier=pair.verify, draft=pair.draft, policy=policy.name, length_class=length_class
            )
        assert policy.route.direct is not None
        return Plan(mode="direct", tier=policy.route.direct, policy=policy.name, length_class=length_class)

    def answering_tier(self, model: str) -> str:
        """The tier whose tokens a model name answers with: its tokenizer and context apply."""
        return self.plan(model, Prompt()).tier

    def _first_match(self) -> Policy:
        """Policies have no conditions yet: the first is the match (`config` refuses any after it)."""
        return self._config.policies[0]


def classify_length(prompt: Prompt) -> Literal["short", "medium", "long"]:
    """The class that a client's own limit proves; without a limit nothing is known: `medium`."""
    if prompt.max_tokens is None:
        return "medium"
    if prompt.max_tokens <= SHORT_TOKENS:
        return "short"
    return "medium" if prompt.max_tokens <= MEDIUM_TOKENS else "long"


def describe_plan(plan: Plan) -> str:
    """The value of the `x-stepwell-plan` header."""
    tiers = f"draft={plan.draft}; verify={plan.tier}" if plan.mode == "speculate" else f"tier={plan.tier}"
    return f"{plan.mode}; {tiers}; policy={plan.policy}"
