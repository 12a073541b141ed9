"""What `stepwell serve` fetches by itself, and what it cannot."""

from pathlib import Path

import pytest

from cascade.errors import BundleError, SourceError
from gateway.cli.bundles import ensure_bundles, split_recipe
from gateway.config import parse_config
from gateway.yaml_source import parse_yaml


@pytest.mark.parametrize(
    ("bundle", "expected"),
    [
        ("qwen2.5-coder-1.5b", ("qwen2.5-coder-1.5b", None)),
        ("qwen2.5-coder-1.5b-w8a8", ("qwen2.5-coder-1.5b", "w8a8")),
        ("exact", ("exact", None)),
    ],
)
def test_a_recipe_may_end_a_bundles_name(bundle: str, expected: tuple[str, str | None]) -> None:
    assert split_recipe(bundle) == expected


@pytest.mark.parametrize("text", ["tiers: {a: {bundle: ./absent}}", "models_dir: m\ntiers: {a: {bundle: absent}}"])
def test_paths_and_own_directories_are_not_pulled(text: str, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"tier 'a'.*absent is not a bundle"):
        ensure_bundles(parse_config(parse_yaml(text, "f.yaml"), tmp_path))


def test_a_name_that_no_catalogue_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_HOME", str(tmp_path))
    with pytest.raises(SourceError, match="qwen3-coder-9000b"):
        ensure_bundles(parse_config(parse_yaml("tiers: {a: {bundle: qwen3-coder-9000b}}", "f.yaml")))


def test_bundles_that_are_there_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "bundle.json").write_text("{}")
    ensure_bundles(parse_config(parse_yaml("tiers: {a: {bundle: ./there}}", "f.yaml"), tmp_path))
