"""The configuration file: its shape, its defaults, and errors that name file, line and the nearest key."""

import difflib
import importlib.resources
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from cascade.errors import ConfigError
from gateway.yaml_source import Location, YamlSource, parse_yaml, read_yaml

AUTO_MODEL = "auto"
"""The model name that the policies answer."""

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def parse_size(value: object) -> object:
    """`4MiB`, `2 GB` or a number of bytes -> bytes. Other values are left for pydantic to refuse."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?|)b?", value.strip().lower())
    if match is None:
        raise ValueError(f"{value!r} is not a size; write a number of bytes or for example 512MiB")
    return int(float(match[1]) * _UNITS[match[2]])


Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ServerConfig(_Section):
    """Sockets, limits and keys."""

    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    max_body: Size = 4 << 20
    max_choices: int = Field(default=32, ge=1, le=1024)
    drain_timeout_s: float = Field(default=30.0, ge=0)
    keep_alive_s: float = Field(default=75.0, gt=0)
    stream_comment_s: float = Field(default=15.0, gt=0)
    api_keys_env: str | None = None
    api_keys_file: str | None = None


class LogConfig(_Section):
    """What is written to standard error. Prompts and answers never are."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class TierSpec(_Section):
    """One model."""

    bundle: str = Field(min_length=1)
    """A name under `models_dir`, or a path (relative to the configuration file)."""


class SpeculateRoute(_Section):
    """`draft` proposes, `verify` decides: the answer is `verify`'s own, token for token."""

    draft: Name
    verify: Name


class Route(_Section):
    """Exactly one of its keys says how a request is answered."""

    direct: Name | None = None
    speculate: SpeculateRoute | None = None


class Policy(_Section):
    """A named route."""

    name: Name
    route: Route


class EngineSection(_Section):
    """Sizes of the engine process."""

    threads: int | None = Field(default=None, ge=1, le=1024)
    kv_memory: Size | None = None
    max_batch_tokens: int = Field(default=512, ge=16, le=65536)
    max_sequences: int = Field(default=64, ge=1, le=4096)
    max_waiting: int = Field(default=256, ge=1, le=1_000_000)
    draft_tokens: int = Field(default=8, ge=0, le=32)
    start_timeout_s: float = Field(default=300.0, gt=0)


class Config(_Section):
    """The whole file. Relative paths are relative to `base_dir`, the file's own directory."""

    server: ServerConfig = ServerConfig()
    log: LogConfig = LogConfig()
    models_dir: str | None = None
    tiers: dict[Name, TierSpec] = Field(min_length=1)
    policies: list[Policy] = Field(min_length=1)
    engine: EngineSection = EngineSection()
    base_dir: Path = Field(default=Path("."), exclude=True)

    def bundles_dir(self) -> Path:
        """Where named bundles live."""
        if self.models_dir is not None:
            return self._resolve(self.models_dir)
        home = os.environ.get("STEPWELL_HOME")
        return (Path(home) if home else Path.home() / ".cache" / "stepwell") / "bundles"

    def bundle_path(self, tier: str) -> Path:
        """The directory of a tier's bundle; it need not exist yet."""
        bundle = self.tiers[tier].bundle
        if is_path(bundle):
            return self._resolve(bundle)
        return self.bundles_dir() / bundle

    def _resolve(self, text: str) -> Path:
        path = Path(text).expanduser()
        return path if path.is_absolute() else (self.base_dir / path).resolve()


def is_path(bundle: str) -> bool:
    """Whether a tier's `bundle` is a path and not a name of `models_dir`."""
    return "/" in bundle or bundle.startswith((".", "~"))


def default_text() -> str:
    """The commented default file that ships in the package."""
    return importlib.resources.files("gateway").joinpath("default.yaml").read_text(encoding="utf-8")


def load_config(path: Path | None) -> Config:
    """Read and check a file; None gives the defaults. Raises ConfigError listing every fault, one a line."""
    if path is None:
        return parse_config(parse_yaml(default_text(), "default.yaml"))
    return parse_config(read_yaml(path), path.parent.resolve())


def parse_config(source: YamlSource, base_dir: Path = Path()) -> Config:
    """Check a parsed file: sections that it leaves out come from the defaults."""
    data = {} if source.data is None else source.data
    if not isinstance(data, dict):
        raise ConfigError(source.error((), "the file must be a mapping with keys such as server, tiers, policies"))
    if "base_dir" in data:
        raise ConfigError(source.error(("base_dir",), "unknown key 'base_dir'"))
    defaults = parse_yaml(default_text(), "default.yaml").data
    for key in ("tiers", "policies"):
        # Own tiers without policies: the defaults' policies would name tiers that are not there.
        if key not in data:
            own_tiers = key == "policies" and "tiers" in data
            data = data | {key: default_policies(data["tiers"]) if own_tiers else defaults[key]}
    try:
        config = Config.model_validate(data | {"base_dir": base_dir})
    except ValidationError as error:
        faults = [source.error(fault["loc"], _describe(fault, data)) for fault in error.errors()]
        raise ConfigError("\n".join(faults)) from None
    if faults := _check_references(config, source):
        raise ConfigError("\n".join(faults))
    return config


def default_policies(tiers: Any) -> list[dict[str, Any]]:
    """Policies for a file that names tiers only: two or more speculate (first drafts for last), one is direct."""
    names = list(tiers) if isinstance(tiers, dict) and tiers else ["small"]
    if len(names) == 1:
        return [{"name": "default", "route": {"direct": names[0]}}]
    return [{"name": "default", "route": {"speculate": {"draft": names[0], "verify": names[-1]}}}]


def _check_references(config: Config, source: YamlSource) -> list[str]:
    faults: list[str] = []
    if AUTO_MODEL in config.tiers:
        faults.append(source.error(("tiers", AUTO_MODEL), f"{AUTO_MODEL!r} is the policies' name, not a tier's"))
    engine = config.engine
    if engine.max_batch_tokens < 2 * engine.max_sequences:
        message = f"max_batch_tokens {engine.max_batch_tokens} must be at least twice max_sequences"
        location: Location = (
            "engine",
            "max_batch_tokens" if ("engine", "max_batch_tokens") in source.lines else "max_sequences",
        )
        faults.append(source.error(location, f"{message} {engine.max_sequences}"))
    seen: set[str] = set()
    for index, policy in enumerate(config.policies):
        here: Location = ("policies", index)
        if policy.name in seen:
            faults.append(source.error((*here, "name"), f"a second policy is called {policy.name!r}"))
        seen.add(policy.name)
        if index:
            faults.append(source.error(here, f"policy {policy.name!r} is never reached: the one before always matches"))
        route = policy.route
        if (route.direct is None) == (route.speculate is None):
            faults.append(source.error((*here, "route"), "a route has exactly one of direct, speculate"))
            continue
        if route.direct is not None:
            named: list[tuple[Location, str]] = [((*here, "route", "direct"), route.direct)]
        else:
            assert route.speculate is not None
            pair = (*here, "route", "speculate")
            named = [((*pair, "draft"), route.speculate.draft), ((*pair, "verify"), route.speculate.verify)]
            if route.speculate.draft == route.speculate.verify:
                faults.append(source.error(pair, "a tier cannot draft for itself"))
        for location, tier in named:
            if tier not in config.tiers:
                faults.append(source.error(location, f"no tier is called {tier!r}{suggest(tier, config.tiers)}"))
    return faults


def _describe(fault: Any, data: Any) -> str:
    """One sentence about a pydantic error, with the nearest known key when one is misspelt."""
    location: Location = fault["loc"]
    path = ".".join(str(part) for part in location if part != "[key]")
    if fault["type"] == "extra_forbidden":
        known = _fields_at(location[:-1])
        return f"unknown key {path!r}{suggest(str(location[-1]), known)}"
    if fault["type"] == "missing":
        return f"{path}: required"
    if fault["type"] in ("model_type", "dict_type"):
        return f"{path}: must be a mapping (it is {fault['input']!r})"
    message = str(fault["msg"]).removeprefix("Value error, ")
    value = fault["input"]
    plain = isinstance(value, str | int | float | bool) or value is None
    shown = f" (it is {value!r})" if plain and repr(value) not in message else ""
    return f"{path}: {message[0].lower() + message[1:] if message[:1].isupper() else message}{shown}"


def _fields_at(location: Location) -> list[str]:
    """Names of the fields of the model at a location, following dict values, list items and optionals."""
    annotation: Any = Config
    for part in location:
        annotation = _strip(annotation)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            field = annotation.model_fields.get(str(part))
            annotation = field.annotation if field is not None else None
        else:
            arguments = getattr(annotation, "__args__", ())
            annotation = arguments[-1] if arguments else None
    annotation = _strip(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [name for name, field in annotation.model_fields.items() if not field.exclude]
    return []


def _strip(annotation: Any) -> Any:
    """`X | None` -> `X`."""
    arguments = [a for a in getattr(annotation, "__args__", ()) if a is not type(None)]
    if type(None) in getattr(annotation, "__args__", ()) and len(arguments) == 1:
        return arguments[0]
    return annotation


def suggest(name: str, known: Any) -> str:
    """`; did you mean 'x'?`, or the known names when none is near, or nothing when there are none."""
    names = [str(item) for item in known]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(sorted(names))}" if names else ""
