"""Model names to plans."""

import pytest

from cascade.errors import UnknownModelError
from gateway.config import Config, parse_config
from gateway.router import Prompt, Router, classify_length, describe_plan
from gateway.yaml_source import parse_yaml


def config(text: str) -> Config:
    return parse_config(parse_yaml(text, "f.yaml"))


def test_auto_follows_the_policy() -> None:
    plan = Router(config("tiers: {a: {bundle: x}, b: {bundle: y}}")).plan("auto", Prompt())
    assert (plan.mode, plan.tier, plan.draft, plan.policy) == ("speculate", "b", "a", "default")


def test_auto_may_be_direct() -> None:
    plan = Router(config("tiers: {a: {bundle: x}}")).plan("auto", Prompt())
    assert (plan.mode, plan.tier, plan.draft) == ("direct", "a", None)


def test_a_bundles_name_is_a_tiers_alias() -> None:
    router = Router(config("tiers: {a: {bundle: x}, b: {bundle: y}}"))
    assert router.plan("y", Prompt()) == router.plan("b", Prompt())


def test_a_bundle_of_two_tiers_is_no_alias() -> None:
    with pytest.raises(UnknownModelError):
        Router(config("tiers: {a: {bundle: x}, b: {bundle: x}}")).plan("x", Prompt())


def test_paths_are_no_model_names() -> None:
    with pytest.raises(UnknownModelError):
        Router(config("tiers: {a: {bundle: ./x}}")).plan("./x", Prompt())


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, "medium"), (1, "short"), (128, "short"), (129, "medium"), (1025, "long")]
)
def test_length_classes(limit: int | None, expected: str) -> None:
    assert classify_length(Prompt(max_tokens=limit)) == expected


def test_plans_are_described_for_the_header() -> None:
    router = Router(config("tiers: {a: {bundle: x}, b: {bundle: y}}"))
    assert describe_plan(router.plan("auto", Prompt())) == "speculate; draft=a; verify=b; policy=default"
    assert describe_plan(router.plan("a", Prompt())) == "direct; tier=a; policy=model:a"
