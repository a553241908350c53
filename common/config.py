"""Settings of one process: TOML file, environment, flags and `--set`, into one frozen model.

Unknown keys are refused and the nearest known one is named. Secrets are given as
file paths. The last source wins; nothing is read again after start.
"""

from __future__ import annotations

import copy
import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import ConfigError


class Section(BaseModel):
    """A part of a configuration: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Config = TypeVar("Config", bound=BaseModel)


def load_config(
    kind: type[Config],
    *,
    defaults: Mapping[str, Any] | None = None,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    prefix: str = "",
    flags: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
) -> Config:
    """Read a configuration; each source wins over those before it.

    Args:
        defaults: values of a preset.
        environment: variables `PREFIX__SECTION__KEY=value` override the file.
        flags: values given on the command line by their own names.
        overrides: `section.key=value` texts, as given with `--set`.
    Raises:
        ConfigError: one line that names the key, the problem and the nearest known key.
    """
    values = merged(defaults or {})
    if file is not None:
        _merge(values, _read_toml(file))
    for name, value in (environment or {}).items():
        if prefix and name.startswith(f"{prefix}__"):
            _assign(values, name.removeprefix(f"{prefix}__").lower().split("__"), value)
    _merge(values, flags or {})
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set {override!r} is not key=value")
        _assign(values, key.strip().split("."), value.strip())
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, kind)) from error


def explain(error: ValidationError, kind: type[BaseModel]) -> str:
    """The first problem in one line, with the nearest known key where one is unknown."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    where = ".".join(path)
    if first["type"] == "extra_forbidden":
        known = _keys_at(kind, path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
        return f"unknown key {where!r}; {hint}"
    if first["type"] == "missing":
        return f"{where} is missing"
    message = first["msg"].removeprefix("Value error, ")
    return f"{where} = {first['input']!r}: {message}" if where else message


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {type(error).__name__}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error


def merged(*presets: Mapping[str, Any]) -> dict[str, Any]:
    """Several presets as one, section by section; the later ones win."""
    values: dict[str, Any] = {}
    for preset in presets:
        _merge(values, copy.deepcopy(dict(preset)))
    return values


def _merge(values: dict[str, Any], newer: Mapping[str, Any]) -> None:
    for key, value in newer.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _merge(values[key], value)
        else:
            values[key] = value


def _assign(values: dict[str, Any], path: list[str], text: str) -> None:
    for part in path[:-1]:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{'.'.join(path)} goes into {part!r}, which is not a section")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    values[path[-1]] = parsed["value"] if set(parsed) == {"value"} else text


def _keys_at(kind: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        field = kind.model_fields.get(part)
        inner = field.annotation if field is not None else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        kind = inner
    return list(kind.model_fields)
