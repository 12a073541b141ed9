"""Fetches the bundles that a configuration names and this machine lacks, before anything is started."""

import threading

from cascade.bundle import MANIFEST_FILE
from cascade.errors import BundleError
from exporters.recipes import RECIPES
from exporters.sources.pull import pull
from exporters.sources.report import Reporter
from gateway.config import Config, is_path
from gateway.logs import log_event

STEPS = 10
"""How often a long task reports: every tenth of it."""


def ensure_bundles(config: Config, reporter: Reporter | None = None) -> None:
    """Pull every missing bundle that has a catalogue name (`NAME` or `NAME-RECIPE`).

    Raises SourceError when one cannot be had, BundleError for what no pull can bring: a path, or a `models_dir`
    of one's own.
    """
    for tier, spec in config.tiers.items():
        directory = config.bundle_path(tier)
        if (directory / MANIFEST_FILE).is_file():
            continue
        if is_path(spec.bundle) or config.models_dir is not None:
            raise BundleError(f"tier {tier!r}: {directory} is not a bundle; make one with `stepwell export`")
        name, recipe = split_recipe(spec.bundle)
        log_event("pulling", tier=tier, model=name, recipe=recipe)
        pull(name, recipe, home=config.bundles_dir().parent, reporter=reporter or LogReporter())


def split_recipe(bundle: str) -> tuple[str, str | None]:
    """`qwen2.5-coder-1.5b-w8a8` -> the catalogue's name and the recipe, None where the name has none."""
    name, _, recipe = bundle.rpartition("-")
    return (name, recipe) if name and recipe in RECIPES else (bundle, None)


class LogReporter:
    """Tells a pull's stages to the log; called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: dict[str, int] = {}

    def say(self, message: str) -> None:
        """One line."""
        log_event("pull", message=message)

    def progress(self, task: str, done: int, total: int) -> None:
        """A line for every tenth of a task."""
        step = STEPS * done // total if total else STEPS
        with self._lock:
            if self._told.get(task, 0) >= step:
                return
            self._told[task] = step
        log_event("pull", task=task, percent=100 * step // STEPS)
