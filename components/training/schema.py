"""The shape of a config, declared by its recipe, and the check against it.

A schema is a dict of fields; a nested dict is a section of the config::

    SCHEMA = {
        "seed": Int(min=0),
        "dtype": OneOf("bf16", "fp32"),
        "rollout": {"group_size": Int(min=1), "temperature": Float(gt=0)},
        "optimizer": Component(positional=1),
    }

A field with a default may be absent; one whose default is None may also be null.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from components.training.component import check_component, did_you_mean, is_component

REQUIRED: Any = type("_Required", (), {"__repr__": lambda _: "REQUIRED"})()
"""The default of a field that has none."""


class Field:
    """One key of a config: says what is allowed and checks a value."""

    allowed: str
    """What may stand here, as a phrase that follows "must be"."""

    def __init__(self, *, default: Any = REQUIRED) -> None:
        self.default = default

    @property
    def must_be(self) -> str:
        """``allowed``, and null where the default is None."""
        return f"must be {self.allowed}" + (", or null" if self.default is None else "")

    def fill(self, value: Any) -> Any:
        """The value with the defaults of absent keys inside it."""
        return value

    def check(self, value: Any, path: str, problems: list[str]) -> Any:
        """The value, converted where that loses nothing; what is wrong goes to ``problems``."""
        if value is None and self.default is None:
            return None
        if self._accepts(value):
            return self._check_inside(value, path, problems)
        problems.append(f"{path} = {value!r}: {self.must_be}{self._hint(value)}")
        return value

    def _accepts(self, value: Any) -> bool:
        raise NotImplementedError

    def _check_inside(self, value: Any, path: str, problems: list[str]) -> Any:
        return value

    def _hint(self, value: Any) -> str:
        return ""


class Int(Field):
    """An integer within bounds: min and max are allowed themselves, gt and lt are not."""

    _noun: str = "an integer"

    def __init__(
        self,
        *,
        min: float = -math.inf,
        max: float = math.inf,
        gt: float = -math.inf,
        lt: float = math.inf,
        default: Any = REQUIRED,
    ) -> None:
        super().__init__(default=default)
        self._bounds = (min, max, gt, lt)
        signs = zip((">=", "<=", ">", "<"), self._bounds, strict=True)
        texts = [f"{sign} {bound}" for sign, bound in signs if math.isfinite(bound)]
        self.allowed = " ".join([self._noun, " and ".join(texts)]).rstrip()

    def _accepts(self, value: Any) -> bool:
        low, high, above, below = self._bounds
        is_whole = type(value) is int or (type(value) is float and value.is_integer())
        return is_whole and low <= value <= high and above < value < below

    def _check_inside(self, value: Any, path: str, problems: list[str]) -> Any:
        return int(value)  # 1e3 is a float in YAML


class Float(Int):
    """A finite number within bounds; an integer is converted."""

    _noun = "a number"

    def _accepts(self, value: Any) -> bool:
        low, high, above, below = self._bounds
        is_number = type(value) in (int, float) and math.isfinite(value)
        return is_number and low <= value <= high and above < value < below

    def _check_inside(self, value: Any, path: str, problems: list[str]) -> Any:
        return float(value)


class Bool(Field):
    """true or false."""

    allowed = "true or false"

    def _accepts(self, value: Any) -> bool:
        return isinstance(value, bool)


class Str(Field):
    """A string that is not empty."""

    allowed = "a string that is not empty"

    def _accepts(self, value: Any) -> bool:
        return isinstance(value, str) and value != ""


class OneOf(Field):
    """One of a few values."""

    def __init__(self, *values: Any, default: Any = REQUIRED) -> None:
        super().__init__(default=default)
        self.values = values
        named = (str(v).lower() if isinstance(v, bool) else str(v) for v in values)
        self.allowed = "one of " + ", ".join(named)

    def _accepts(self, value: Any) -> bool:
        # True == 1 in Python, but not in a config.
        return any(type(value) is type(choice) and value == choice for choice in self.values)

    def _hint(self, value: Any) -> str:
        meant = {"gpu": "cuda"}.get(str(value), str(value))
        return did_you_mean(meant, [v for v in self.values if isinstance(v, str)])


class Anything(Field):
    """A value that the schema does not look into."""

    allowed = "any value"

    def _accepts(self, value: Any) -> bool:
        return True


class Component(Field):
    """A mapping with ``_component_``, the dotted path of a callable, and its keyword arguments.

    Args:
        provided: Keyword arguments that the recipe passes itself; the config may not set them.
        positional: How many leading positional arguments the recipe passes.
        default: None makes the component optional.
    """

    allowed = "a mapping with _component_ and its keyword arguments"

    def __init__(
        self, *, provided: Iterable[str] = (), positional: int = 0, default: Any = REQUIRED
    ) -> None:
        super().__init__(default=default)
        self.provided = tuple(provided)
        self.positional = positional

    def _accepts(self, value: Any) -> bool:
        return isinstance(value, Mapping)

    def _check_inside(self, value: Any, path: str, problems: list[str]) -> Any:
        problems += check_component(value, path, provided=self.provided, positional=self.positional)
        return value


class ListOf(Field):
    """A list whose elements all satisfy one field or section."""

    def __init__(self, element: Schema, *, min_length: int = 0, default: Any = REQUIRED) -> None:
        super().__init__(default=default)
        self.element = as_field(element)
        self.min_length = min_length
        least = f" of at least {min_length}" if min_length else ""
        self.allowed = f"a list{least}, each element {self.element.allowed}"

    def fill(self, value: Any) -> Any:
        return [self.element.fill(v) for v in value] if isinstance(value, list) else value

    def _accepts(self, value: Any) -> bool:
        return isinstance(value, list) and len(value) >= self.min_length

    def _check_inside(self, value: Any, path: str, problems: list[str]) -> Any:
        return [self.element.check(v, f"{path}[{i}]", problems) for i, v in enumerate(value)]


class MapOf(Field):
    """A mapping with free keys whose values all satisfy one field or section."""

    def __init__(self, element: Schema, *, default: Any = REQUIRED) -> None:
        super().__init__(default=default)
        self.element = as_field(element)
        self.allowed = f"a mapping, each value {self.element.allowed}"

    def fill(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {key: self.element.fill(inner) for key, inner in value.items()}

    def _accepts(self, value: Any) -> bool:
        return isinstance(value, Mapping)

    def _check_inside(self, value: Any, path: str, problems: list[str]) -> Any:
        return {k: self.element.check(v, f"{path}.{k}", problems) for k, v in value.items()}


class Section(Field):
    """A part of the config with keys of its own. A plain dict in a schema is a required one.

    Args:
        fields: Key to field, or to the dict of a nested section.
        default: None makes the whole section optional.
    """

    def __init__(self, fields: Mapping[str, Schema], *, default: Any = REQUIRED) -> None:
        super().__init__(default=default)
        self.fields = {key: as_field(field) for key, field in fields.items()}
        self.allowed = "a mapping with the keys " + ", ".join(self.fields)

    def fill(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        filled = dict(value)
        for key, field in self.fields.items():
            if key in value:
                filled[key] = field.fill(value[key])
            elif field.default is not REQUIRED:
                filled[key] = field.fill(field.default)
            elif isinstance(field, Section):  # so that each key missing in it is named
                filled[key] = field.fill({})
        return filled

    def _accepts(self, value: Any) -> bool:
        return isinstance(value, Mapping)

    def _check_inside(self, value: Any, path: str, problems: list[str]) -> Any:
        prefix = f"{path}." if path else ""
        for key in value:
            if key not in self.fields:
                problems.append(
                    f"{prefix}{key}: unknown key{self._suggest(str(key), prefix, value)}"
                )
        checked = {}
        for key, field in self.fields.items():
            if key in value:
                checked[key] = field.check(value[key], prefix + key, problems)
            else:
                problems.append(f"{prefix}{key}: missing; {field.must_be}")
        return checked

    def _suggest(self, key: str, prefix: str, value: Mapping[str, Any]) -> str:
        for name, inner in value.items():
            if is_component(inner) and key in inner:  # such as lr, of the optimizer
                return f"; did you mean '{prefix}{name}.{key}'?"
        deeper = {path.rpartition(".")[2]: prefix + path for path in self.paths()}
        return (
            did_you_mean(key, {f: prefix + f for f in self.fields} if key not in deeper else {})
            or did_you_mean(key, deeper)
            or "; the keys here are " + ", ".join(sorted(self.fields))
        )

    def paths(self) -> list[str]:
        """Every key path below this section, dotted."""
        found = []
        for key, field in self.fields.items():
            inner = field.paths() if isinstance(field, Section) else []
            found += [key, *(f"{key}.{path}" for path in inner)]
        return found


Schema: TypeAlias = "Field | Mapping[str, Any]"


def as_field(schema: Schema) -> Field:
    """The field itself, or the section that a plain dict stands for."""
    return schema if isinstance(schema, Field) else Section(schema)


def describe(section: Field, *, indent: int = 2) -> str:
    """The keys of a section, one a line, with what is allowed and the default."""
    assert isinstance(section, Section)
    lines = []
    for key, field in section.fields.items():
        default = "" if field.default is REQUIRED else f" (default {field.default})"
        if isinstance(field, Section):
            lines += [" " * indent + f"{key}:{default}", describe(field, indent=indent + 2)]
        else:
            lines.append(" " * indent + f"{key}: {field.allowed}{default}")
    return "\n".join(lines)
