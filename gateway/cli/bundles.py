"""Fetches the bundles that a configuration names and this machine lacks, before anything is started."""

from cascade.bundle import MANIFEST_FILE
from cascade.errors import BundleError
from exporters.recipes import RECIPES
from exporters.sources.pull import pull
from gateway.cli.progress import TerminalReporter
from gateway.config import Config, is_path


def ensure_bundles(config: Config) -> None:
    """Pull every missing bundle that has a catalogue name (`NAME` or `NAME-RECIPE`).

    Raises SourceError when one cannot be had, BundleError for what no pull can bring: a path, or a `models_dir`
    of one's own.
    """
    missing = [tier for tier in config.tiers if not (config.bundle_path(tier) / MANIFEST_FILE).is_file()]
    for tier in missing:
        if is_path(config.tiers[tier].bundle) or config.models_dir is not None:
            directory = config.bundle_path(tier)
            raise BundleError(f"tier {tier!r}: {directory} is not a bundle; make one with `stepwell export`")
    if missing:
        with TerminalReporter() as reporter:
            for bundle in dict.fromkeys(config.tiers[tier].bundle for tier in missing):
                name, recipe = split_recipe(bundle)
                pull(name, recipe, home=config.bundles_dir().parent, reporter=reporter)


def split_recipe(bundle: str) -> tuple[str, str | None]:
    """`qwen2.5-coder-1.5b-w8a8` -> the catalogue's name and the recipe, None where the name has none."""
    name, _, recipe = bundle.rpartition("-")
    return (name, recipe) if name and recipe in RECIPES else (bundle, None)
