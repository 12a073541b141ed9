"""YAML with line numbers: plain values for pydantic, and a line for every key and item."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cascade.errors import ConfigError

Location = tuple[str | int, ...]


@dataclass(slots=True)
class YamlSource:
    """A parsed file. `lines` maps a location such as `("tiers", "small", "bundle")` to a 1-based line."""

    name: str
    data: Any
    lines: dict[Location, int] = field(default_factory=dict)

    def line(self, location: Sequence[str | int]) -> int:
        """The line of a location, or of its nearest parent that the file has (missing keys, union tags)."""
        parts = tuple(location)
        while parts and parts not in self.lines:
            parts = parts[:-1]
        return self.lines.get(parts, 1)

    def error(self, location: Sequence[str | int], message: str) -> str:
        """`file:line: message`, the form that editors jump to."""
        return f"{self.name}:{self.line(location)}: {message}"


def parse_yaml(text: str, name: str) -> YamlSource:
    """Parse one YAML document with the safe tags only. Raises ConfigError with file and line.

    Duplicate keys are an error: PyYAML would silently keep the last one.
    """
    try:
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            source = YamlSource(name, None)
            if root is not None:
                source.data = _build(loader, root, (), source, frozenset())
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError(f"{name}:{line}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}:1: not valid YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{name}:1: nested too deeply") from error
    return source


def read_yaml(path: Path) -> YamlSource:
    """`parse_yaml` of a file. Raises ConfigError when it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    return parse_yaml(text, str(path))


def _build(
    loader: yaml.SafeLoader, node: yaml.Node, location: Location, source: YamlSource, parents: frozenset[int]
) -> Any:
    source.lines.setdefault(location, node.start_mark.line + 1)
    if id(node) in parents:
        raise ConfigError(source.error(location, "an alias refers to its own parent"))
    inside = parents | {id(node)}
    if isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str | int | float | bool):
                raise ConfigError(f"{source.name}:{line}: a key must be plain text")
            key = key if isinstance(key, str) else str(key)
            if key in mapping:
                raise ConfigError(f"{source.name}:{line}: {key!r} is given twice")
            source.lines[(*location, key)] = line
            mapping[key] = _build(loader, value_node, (*location, key), source, inside)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_build(loader, item, (*location, index), source, inside) for index, item in enumerate(node.value)]
    return loader.construct_object(node)
