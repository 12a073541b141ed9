"""The configuration file: defaults that work, and faults named with line and suggestion."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cascade.errors import ConfigError
from gateway.cli.check import check
from gateway.config import Config, load_config, parse_config
from gateway.engine_settings import engine_config
from gateway.yaml_source import parse_yaml
from tests.gateway.support import TWO_TIERS


def parse(text: str) -> Config:
    return parse_config(parse_yaml(text, "f.yaml"))


def fault(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    return str(caught.value)


def test_defaults_are_the_documented_pair() -> None:
    config = load_config(None)
    assert {name: tier.bundle for name, tier in config.tiers.items()} == {
        "small": "qwen2.5-coder-0.5b",
        "large": "qwen2.5-coder-1.5b",
    }
    assert config.policies[0].route.speculate is not None
    assert config.policies[0].route.speculate.draft == "small"


def test_shipped_file_says_what_the_code_defaults_to() -> None:
    shipped = load_config(None)
    assert shipped == parse("{}")


def test_an_empty_file_gives_the_defaults() -> None:
    assert parse("") == load_config(None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("server:\n  prot: 1\n", "f.yaml:2: unknown key 'server.prot'; did you mean 'port'?"),
        ("sever: {}\n", "f.yaml:1: unknown key 'sever'; did you mean 'server'?"),
        (
            "tiers:\n  a:\n    bundel: x\n    bundle: y\n",
            "f.yaml:3: unknown key 'tiers.a.bundel'; did you mean 'bundle'?",
        ),
        (
            TWO_TIERS
            + "policies:\n  - name: q\n    route:\n      speculate: {draft: small, verify: large, verfy: b}\n",
            "f.yaml:5: unknown key 'policies.0.route.speculate.verfy'; did you mean 'verify'?",
        ),
        ("\nengine: 3\n", "f.yaml:2: engine: must be a mapping (it is 3)"),
        (
            "server:\n  host: x\n  port: 99999\n",
            "f.yaml:3: server.port: input should be less than or equal to 65535 (it is 99999)",
        ),
        ("server: {port: '80'}", "f.yaml:1: server.port: input should be a valid integer (it is '80')"),
        ("a: [", "f.yaml:1: not valid YAML: expected the node content, but found '<stream end>'"),
        ("server: {}\nserver: {}", "f.yaml:2: 'server' is given twice"),
        ("- 1", "f.yaml:1: the file must be a mapping with keys such as server, tiers, policies"),
        ("tiers:\n  auto: {bundle: x}", "f.yaml:2: 'auto' is the policies' name, not a tier's"),
    ],
)
def test_faults_name_line_and_nearest_key(text: str, expected: str) -> None:
    assert fault(text) == expected


def test_size_with_a_strange_unit() -> None:
    assert fault("server:\n  max_body: 4 bananas\n").startswith("f.yaml:2: server.max_body: '4 bananas' is not a size")


def test_every_fault_is_listed() -> None:
    assert len(fault("server: {port: -1}\nlog: {level: loud}\n").splitlines()) == 2


def test_policy_naming_an_unknown_tier() -> None:
    text = "tiers: {small: {bundle: x}}\npolicies:\n  - name: p\n    route: {direct: smal}\n"
    assert fault(text) == "f.yaml:4: no tier is called 'smal'; did you mean 'small'?"


def test_policy_after_one_that_always_matches() -> None:
    text = "policies:\n  - {name: a, route: {direct: small}}\n  - {name: b, route: {direct: large}}\n"
    assert "f.yaml:3: policy 'b' is never reached" in fault(text)


@pytest.mark.parametrize("route", ["{}", "{direct: small, speculate: {draft: small, verify: large}}"])
def test_route_must_have_exactly_one_form(route: str) -> None:
    assert "exactly one of direct, speculate" in fault(f"policies: [{{name: a, route: {route}}}]")


def test_tier_drafting_for_itself() -> None:
    text = "policies: [{name: a, route: {speculate: {draft: small, verify: small}}}]"
    assert "cannot draft for itself" in fault(text)


def test_own_single_tier_gets_a_direct_policy() -> None:
    assert parse("tiers: {only: {bundle: x}}").policies[0].route.direct == "only"


def test_step_budget_below_the_sequences_is_refused() -> None:
    assert fault("engine:\n  max_sequences: 512\n").startswith("f.yaml:2: max_batch_tokens 512 must be at least twice")


def test_merge_keys_and_anchors_work() -> None:
    config = parse("tiers:\n  a: &x {bundle: b1}\n  b: {<<: *x}\n")
    assert config.tiers["b"].bundle == "b1"


def test_an_alias_to_its_parent_is_refused() -> None:
    assert "refers to its own parent" in fault("tiers: &t\n  a: *t\n")


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("models_dir: models\ntiers: {a: {bundle: named}, b: {bundle: ./here}}\n")
    config = load_config(file)
    assert config.bundle_path("a") == tmp_path / "models" / "named"
    assert config.bundle_path("b") == tmp_path / "here"


def test_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "no.yaml")


def test_engine_section_reaches_the_engine() -> None:
    made = engine_config(parse("engine: {threads: 3, kv_memory: 1GiB, draft_tokens: 5}"))
    assert (made.threads, made.kv_memory_bytes, made.draft_tokens) == (3, 1 << 30, 5)


def run_check(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(check)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_check_accepts_a_good_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("server: {port: 1234}\n")
    assert run_check(str(file), "--offline")[0] == 0


def test_check_prints_the_fault_and_fails(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("server: {prot: 1234}\n")
    status, output = run_check(str(file))
    assert (status, output.strip()) == (1, f"{file}:1: unknown key 'server.prot'; did you mean 'port'?")


def test_check_names_missing_bundles(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("tiers: {a: {bundle: ./absent}}\n")
    status, output = run_check(str(file))
    assert status == 1
    assert "tier 'a'" in output
    assert "not a bundle" in output
