"""What E2B knows of a sandbox and we do not: it lies in the sandbox's annotations, as the entry `wire.behalf.ANNOTATION`."""

from collections.abc import Mapping
from typing import Any

import msgspec

from hatchway.wire.behalf import ANNOTATION


class Settings(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The settings that a sandbox was made with. Its network may be changed later."""

    template: str
    """As its id is shown: a template's name, or a snapshot's id with its tag."""
    alias: str | None = None
    """The template's name, where it has one."""
    secure: bool = True
    """Commands and files need the sandbox's token."""
    auto_pause: bool = False
    auto_pause_memory: bool = True
    """An automatic pause keeps the memory too; without it only an explicit connect resumes."""
    auto_resume: bool = False
    allow_internet_access: bool | None = None
    """As it was given; None: not at all."""
    network: dict[str, Any] | None = None
    """As it was given."""

    def annotation(self) -> dict[str, Any]:
        """The entry as it is stored."""
        return {ANNOTATION: msgspec.to_builtins(self)}


def of(annotations: Mapping[str, Any] | None) -> Settings | None:
    """What a sandbox's annotations say; None for one that is not the wrapper's, or that somebody spoilt."""
    entry = (annotations or {}).get(ANNOTATION)
    if entry is None:
        return None
    try:
        return msgspec.convert(entry, Settings)
    except msgspec.ValidationError:
        return None
