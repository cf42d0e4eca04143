"""From YAML or JSON to plain values, and where in the text each stands.

Of YAML this is the part that means the same to everybody: no anchors, aliases, merges or tags, no key twice, one document; and
`yes`, `on` or a date are text, as they look.
"""

import json
import re
from typing import Any

import yaml

from hatchway.domain.policy.problems import PolicyError, Problem

MAX_TEXT = 512 * 1024
MAX_DEPTH = 16
MAX_VALUES = 100_000

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?[0-9]{1,17}\.[0-9]{1,17}")
_PLAIN: dict[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Place = tuple[str | int, ...]


def in_words(place: Place) -> str:
    """`("rules", 3, "id")` as `rules[3].id`."""
    words = ""
    for step in place:
        words += f"[{step}]" if isinstance(step, int) else f".{step}" if words else step
    return words


def parse(text: str) -> tuple[Any, dict[Place, int]]:
    """The value of a text, and the lines of what is in it (YAML only). Raises `PolicyError`."""
    if len(text) > MAX_TEXT:
        raise _unreadable(f"It is longer than {MAX_TEXT} characters.", "Split it into several documents.")
    if text.lstrip()[:1] == "{":
        return _json(text), {}
    return _Yaml(text).value()


def _json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            twice = next(key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1)
            raise _unreadable(f"The key {twice[:80]!a} is there twice in one object.", "Keep one of them.")
        return made

    def refused(constant: str) -> Any:
        raise _unreadable(f"{constant} is no number of JSON.", "Write a number.")

    depth = 0
    for mark in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[{\]}]', text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(mark[0], 0)
        if depth > MAX_DEPTH:
            raise _unreadable(f"It is nested more than {MAX_DEPTH} deep.", "No policy is.")
    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refused)
    except json.JSONDecodeError as error:
        raise _unreadable(f"It is not valid JSON: {error.msg}.", "Correct it.", error.lineno) from None
    except ValueError:
        raise _unreadable("It has a number that is too long.", "Write a shorter one.") from None


class _Yaml:
    """Builds values from the events of the parser, so that nothing is ever expanded."""

    def __init__(self, text: str) -> None:
        self._events = yaml.parse(text, Loader=_LOADER)
        self._lines: dict[Place, int] = {}
        self._count = 0

    def value(self) -> tuple[Any, dict[Place, int]]:
        try:
            self._next()  # the stream's start
            event = self._next()
            if isinstance(event, yaml.StreamEndEvent):
                raise _unreadable("It is empty.", "Write at least `version: 1`, which denies everything.")
            value = self._value(self._next(), ())
            self._next()  # the document's end
            event = self._next()
            if not isinstance(event, yaml.StreamEndEvent):
                raise _unreadable("It has more than one document.", "Put one into each file.", _line(event))
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else None
            raise _unreadable(f"It is not valid YAML: {error.problem}.", "Correct it.", line) from None
        except yaml.YAMLError:
            raise _unreadable("It is not valid YAML: it has characters that may not be there.", "Correct it.") from None
        return value, self._lines

    def _next(self) -> Any:
        return next(self._events)

    def _value(self, event: Any, place: Place) -> Any:
        self._lines[place] = _line(event)
        self._count += 1
        if self._count > MAX_VALUES or len(place) > MAX_DEPTH:
            raise _unreadable(
                "It has too many values, or is nested too deeply.", "No policy is that large.", _line(event)
            )
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _unreadable("It has an anchor or alias.", "Write out what is meant, or use `groups`.", _line(event))
        if event.tag is not None and event.tag != "!":
            raise _unreadable("It has a tag.", "Leave it out.", _line(event))
        if isinstance(event, yaml.ScalarEvent):
            return _scalar(event.value) if event.implicit[0] else event.value
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(place)
        return self._mapping(place)

    def _sequence(self, place: Place) -> list[Any]:
        made: list[Any] = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            made.append(self._value(event, (*place, len(made))))
        return made

    def _mapping(self, place: Place) -> dict[str, Any]:
        made: dict[str, Any] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent) or event.anchor is not None or event.tag not in (None, "!"):
                raise _unreadable("A key is not plain text.", "Write keys as plain text.", _line(event))
            if event.value == "<<" or event.value in made:
                raise _unreadable(
                    f"The key {event.value[:80]!a} is there twice in one object, or merges another.",
                    "Write each key once.",
                    _line(event),
                )
            key = event.value
            made[key] = self._value(self._next(), (*place, key))
            self._lines[(*place, key)] = _line(event)
        return made


def _scalar(text: str) -> Any:
    if text in _PLAIN:
        return _PLAIN[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _unreadable(cause: str, remedy: str, line: int | None = None) -> PolicyError:
    return PolicyError([Problem(place="", code="unreadable", cause=cause, remedy=remedy, line=line)])
