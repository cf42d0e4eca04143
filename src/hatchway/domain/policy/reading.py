"""From a text to a checked document: `load` for what people write, `stored` for what `load` made.

`load` says everything that is wrong at once; one mistake refuses the whole document.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec import inspect

from hatchway.domain.policy.checks import check
from hatchway.domain.policy.forms import FORMS, FormRefused, kind_of
from hatchway.domain.policy.overlaps import overlaps, treatment
from hatchway.domain.policy.problems import MAX_PROBLEMS, PolicyError, Problem
from hatchway.domain.policy.schema import LATER, Document
from hatchway.domain.policy.text import Place, in_words, parse

_ENCODER = msgspec.json.Encoder(order="sorted")
_STORED = msgspec.json.Decoder(Document)


def load(text: str, now: float | None = None) -> Document:
    """Reads a document that somebody wrote, in YAML or JSON. Raises `PolicyError` with all its problems.

    With `now` (Unix seconds), dates that have passed are problems too: so is a document checked that is stored anew.
    """
    value, lines = parse(text)
    reader = _Reader(lines)
    document = reader.read(inspect.type_info(Document), value, ())
    problems = reader.problems
    if not problems:
        problems = [reader.placed(*found) for found in check(document, now)]
    if not problems:
        problems = [reader.placed(*found) for found in _overlaps(document)]
    if problems:
        raise PolicyError(sorted(problems, key=lambda problem: problem.line or 0))
    made: Document = document
    return made


def _overlaps(document: Document) -> Iterator[tuple[Place, str, str, str]]:
    for number, other, pattern in overlaps(document):
        rule, earlier = document.rules[number], document.rules[other]
        yield (
            ("rules", number),
            "overlap",
            f"For {pattern} on a port of both it is `{treatment(rule)}`, while rules[{other}] (`{earlier.id}`) says `{treatment(earlier)}`.",
            "Give one of them other hosts or ports.",
        )


def canonical(document: Document) -> str:
    """The document as JSON with sorted keys and without what is left out: what is stored, hashed and sent."""
    return _ENCODER.encode(document).decode()


def stored(text: str) -> Document:
    """Reads what `canonical` wrote, quickly. Raises `PolicyError` for anything else."""
    try:
        return _STORED.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PolicyError(
            [Problem(place="", code="unreadable", cause=f"It is no stored policy: {error}.", remedy="Store it anew.")]
        ) from None


class _Reader:
    """Makes structures of plain values by what the schema says, and gathers what does not fit."""

    def __init__(self, lines: dict[Place, int]) -> None:
        self._lines = lines
        self.problems: list[Problem] = []

    def placed(self, place: Place, code: str, cause: str, remedy: str) -> Problem:
        line = next((self._lines[place[:end]] for end in range(len(place), -1, -1) if place[:end] in self._lines), None)
        return Problem(place=in_words(place), code=code, cause=cause, remedy=remedy, line=line)

    def _wrong(self, place: Place, code: str, cause: str, remedy: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(self.placed(place, code, cause, remedy))

    def read(self, kind: Any, value: Any, place: Place) -> Any:
        """The value as the schema has it; None where a problem was noted."""
        if isinstance(kind, inspect.Metadata):
            form = (kind.extra or {}).get("form")
            return self._form(FORMS[form], kind.type, value, place) if form else self.read(kind.type, value, place)
        reader = _READERS.get(type(kind))
        if reader is None:
            raise TypeError(f"the schema has a type that nothing reads: {kind}")
        return reader(self, kind, value, place)

    def _form(self, form: Callable[[Any], Any], kind: Any, value: Any, place: Place) -> Any:
        try:
            made = form(value)
        except FormRefused as error:
            return self._wrong(place, error.code, error.cause[:1].upper() + error.cause[1:], error.remedy)
        if isinstance(kind, inspect.StrType | inspect.IntType | inspect.FloatType):
            return self.read(kind, made, place)
        if isinstance(kind, inspect.VarTupleType) and len(made) > (kind.max_length or len(made)):
            return self._wrong(place, "too_many", f"It has more than {kind.max_length} entries.", "Shorten it.")
        return made

    def _struct(self, kind: inspect.StructType, value: Any, place: Place) -> Any:
        if not isinstance(value, dict):
            return self._wrong(
                place, "wrong_type", f"It is {kind_of(value)}, not an object.", "Write its keys below it."
            )
        known = {field.encode_name: field for field in kind.fields}
        made: dict[str, Any] = {}
        before = len(self.problems)
        for key, inner in value.items():
            field = known.get(key)
            if field is None:
                self._unknown(key, list(known), (*place, key))
            elif _is_empty(inner):
                self._wrong(
                    (*place, key),
                    "empty",
                    "It is empty, which may be taken for all or for nothing.",
                    "Fill it, or leave it out.",
                )
            else:
                made[field.name] = self.read(field.type, inner, (*place, key))
        for field in kind.fields:
            if field.required and field.encode_name not in value:
                self._wrong(place, "missing_key", f"The key `{field.encode_name}` is missing.", "Add it.")
        return kind.cls(**made) if len(self.problems) == before else None

    def _unknown(self, key: str, known: list[str], place: Place) -> None:
        if key in LATER:
            self._wrong(place, "not_supported", f"`{key}` is not part of version 1.", LATER[key])
            return
        near = [name for name in known if _alike(name, key)]
        hint = f"Did you mean `{near[0]}`? " if near else ""
        self._wrong(
            place, "unknown_key", f"There is no key {key[:80]!a} here.", f"{hint}Known are: {', '.join(known)}."
        )

    def _tuple(self, kind: inspect.VarTupleType, value: Any, place: Place) -> Any:
        if not isinstance(value, list):
            return self._wrong(place, "wrong_type", f"It is {kind_of(value)}, not a list.", "Write it as a list.")
        if kind.max_length is not None and len(value) > kind.max_length:
            return self._wrong(place, "too_many", f"It has more than {kind.max_length} entries.", "Shorten it.")
        return tuple(self.read(kind.item_type, inner, (*place, number)) for number, inner in enumerate(value))

    def _dict(self, kind: inspect.DictType, value: Any, place: Place) -> Any:
        if not isinstance(value, dict):
            return self._wrong(
                place, "wrong_type", f"It is {kind_of(value)}, not an object.", "Write its keys below it."
            )
        if kind.max_length is not None and len(value) > kind.max_length:
            return self._wrong(place, "too_many", f"It has more than {kind.max_length} entries.", "Shorten it.")
        made = {}
        for key, inner in value.items():
            name = self.read(kind.key_type, key, (*place, key))
            if name in made:
                self._wrong((*place, key), "twice", f"{key[:80]!a} is there twice, in other writing.", "Keep one.")
            made[name] = self.read(kind.value_type, inner, (*place, key))
        return made

    def _union(self, kind: inspect.UnionType, value: Any, place: Place) -> Any:
        options = [option for option in kind.types if not isinstance(option, inspect.NoneType)]
        if value is None and len(options) < len(kind.types):
            return None
        for option in options:
            if isinstance(option, inspect.LiteralType) and value in option.values:
                return value
        plain = [option for option in options if not isinstance(option, inspect.LiteralType)]
        return self.read((plain or options)[0], value, place)

    def _choice(self, kind: inspect.LiteralType | inspect.EnumType, value: Any, place: Place) -> Any:
        enum = kind.cls if isinstance(kind, inspect.EnumType) else None
        values = [member.value for member in enum] if enum else list(kind.values)  # type: ignore[union-attr]  # one or the other
        if type(value) in (str, int) and value in values:
            return enum(value) if enum else value
        if isinstance(value, str) and value in LATER:
            return self._wrong(place, "not_supported", f"`{value}` is not part of version 1.", LATER[value])
        said = ", ".join(map(str, values))
        shown = (
            ascii(value[:80])
            if isinstance(value, str)
            else kind_of(value)
            if not isinstance(value, int)
            else str(value)
        )
        quoted = " Write it in quotes." if str(value) in map(str, values) else ""
        return self._wrong(
            place, "invalid_value", f"It is {shown}, which is none of the values.", f"Write one of: {said}.{quoted}"
        )

    def _text(self, kind: inspect.StrType, value: Any, place: Place) -> Any:
        if not isinstance(value, str):
            return self._wrong(place, "wrong_type", f"It is {kind_of(value)}, not text.", "Write it in quotes.")
        if kind.max_length is not None and len(value) > kind.max_length:
            return self._wrong(place, "too_long", f"It is longer than {kind.max_length} characters.", "Shorten it.")
        if kind.pattern is not None and not re.search(
            kind.pattern.removesuffix("$") + r"\Z" if kind.pattern.endswith("$") else kind.pattern, value
        ):
            if isinstance(value, str) and value in LATER:
                return self._wrong(place, "not_supported", f"`{value}` is not part of version 1.", LATER[value])
            return self._wrong(
                place, "invalid_value", f"{value[:80]!a} does not have the form {kind.pattern}.", "Write it so."
            )
        return value

    def _number(self, kind: inspect.IntType | inspect.FloatType, value: Any, place: Place) -> Any:
        whole = isinstance(kind, inspect.IntType)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            return self._wrong(
                place, "wrong_type", f"It is {kind_of(value)}, not a {'whole ' * whole}number.", "Write a number."
            )
        if (kind.ge is not None and value < kind.ge) or (kind.le is not None and value > kind.le):
            return self._wrong(
                place, "out_of_range", f"It is {value:g}.", f"Write a value from {kind.ge:g} to {kind.le:g}."
            )
        return value if whole else float(value)

    def _boolean(self, kind: inspect.BoolType, value: Any, place: Place) -> Any:
        if not isinstance(value, bool):
            return self._wrong(
                place, "wrong_type", f"It is {kind_of(value)}, not true or false.", "Write `true` or `false`."
            )
        return value


_READERS: dict[type, Callable[[_Reader, Any, Any, Place], Any]] = {
    inspect.StructType: _Reader._struct,
    inspect.VarTupleType: _Reader._tuple,
    inspect.DictType: _Reader._dict,
    inspect.UnionType: _Reader._union,
    inspect.LiteralType: _Reader._choice,
    inspect.EnumType: _Reader._choice,
    inspect.StrType: _Reader._text,
    inspect.IntType: _Reader._number,
    inspect.FloatType: _Reader._number,
    inspect.BoolType: _Reader._boolean,
}


def _is_empty(value: Any) -> bool:
    return isinstance(value, list | dict) and not value


def _alike(name: str, other: str) -> bool:
    """Whether one may be a slip of the other: the same letters but for one or two."""
    if abs(len(name) - len(other)) > 2:
        return False
    row = list(range(len(other) + 1))
    for number, letter in enumerate(name, 1):
        previous, row[0] = row[0], number
        for at, against in enumerate(other, 1):
            previous, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, previous + (letter != against))
    return row[-1] <= min(2, len(name) // 3)
