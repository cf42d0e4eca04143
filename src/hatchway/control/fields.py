"""Fields that several requests have: their types, and the checks that no type can say."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request

from hatchway.control.nodes import NodeLink
from hatchway.domain import shapes
from hatchway.domain.checking import invalid_field
from hatchway.domain.errors import Unprocessable
from hatchway.storage.projects import ProjectRow

MAX_METADATA = 64
MAX_ANNOTATIONS = 16
MAX_ANNOTATION_OCTETS = 64 * 1024
MAX_ENV = 256
MAX_ENV_OCTETS = 32 * 1024
"""The guest gets its environment in one frame of 64 KiB."""

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
METADATA_KEY = re.compile(r'[^\x00-\x1f\x7f"\\]{1,128}')
"""Anything that can be read, without what would have to be escaped where a database looks for it."""
MAX_METADATA_VALUE = 2048
ANNOTATION_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_REFERENCE = r"^[a-z0-9][a-z0-9._/-]{0,127}(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127}|@sha256:[0-9a-f]{64})?$"

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]

Annotations = Annotated[
    dict[str, Any],
    Meta(
        description=f"What programs keep with the sandbox for themselves: at most {MAX_ANNOTATION_OCTETS} octets of JSON in all."
    ),
]

Reference = Annotated[str, Meta(pattern=_REFERENCE, description="`name`, `name:tag` or `name@sha256:…`")]
Vcpus = Annotated[int, Meta(ge=shapes.MIN_VCPUS, le=shapes.MAX_VCPUS)]
MemoryMib = Annotated[int, Meta(ge=shapes.MIN_MEMORY_MIB, le=shapes.MAX_MEMORY_MIB)]
DiskMib = Annotated[int, Meta(ge=shapes.MIN_DISK_MIB, le=shapes.MAX_DISK_MIB)]


def check_env(env: dict[str, str], field: str, *, entries: int = MAX_ENV, octets: int = MAX_ENV_OCTETS) -> None:
    """Raises `invalid_field` for what the guest could not take as environment."""
    allowed = {"entries": entries, "octets": octets, "name": _ENV_NAME.pattern}
    if len(env) > entries:
        raise invalid_field(field, f"it has {len(env)} entries.", f"at most {entries} entries")
    for name, value in env.items():
        if not _ENV_NAME.fullmatch(name):
            raise invalid_field(f"{field}.{name[:64]}", "this is no name of a variable.", allowed)
        if "\0" in value:
            raise invalid_field(f"{field}.{name}", "the value has a NUL character.", allowed)
    size = sum(len(name.encode()) + len(value.encode()) + 2 for name, value in env.items())
    if size > octets:
        raise invalid_field(field, f"it has {size} octets in all.", f"at most {octets} octets")


def check_metadata(metadata: dict[str, str]) -> None:
    """Raises `invalid_field` for too many entries, keys that no filter could name, and long values."""
    if len(metadata) > MAX_METADATA:
        raise invalid_field("metadata", f"it has {len(metadata)} entries.", f"at most {MAX_METADATA} entries")
    for key, value in metadata.items():
        if not METADATA_KEY.fullmatch(key):
            raise invalid_field(f"metadata.{key[:64]}", "this is no key.", {"pattern": METADATA_KEY.pattern})
        if len(value) > MAX_METADATA_VALUE:
            allowed = {"type": "string", "maxLength": MAX_METADATA_VALUE}
            raise invalid_field(f"metadata.{key}", "the value is too long.", allowed)
        if "\0" in value:
            raise invalid_field(f"metadata.{key}", "the value has a NUL character.", "text without NUL")


def check_annotations(annotations: Mapping[str, Any]) -> None:
    """Raises `invalid_field` for too many entries, keys that are none, and more octets than are kept."""
    if len(annotations) > MAX_ANNOTATIONS:
        raise invalid_field("annotations", f"it has {len(annotations)} entries.", f"at most {MAX_ANNOTATIONS} entries")
    for key in annotations:
        if not ANNOTATION_KEY.fullmatch(key):
            raise invalid_field(f"annotations.{key[:64]}", "this is no key.", {"pattern": ANNOTATION_KEY.pattern})
    size = len(msgspec.json.encode(annotations))
    if size > MAX_ANNOTATION_OCTETS:
        raise invalid_field(
            "annotations", f"it has {size} octets in JSON.", f"at most {MAX_ANNOTATION_OCTETS} octets in all"
        )


def metadata_filters(request: Request) -> dict[str, str]:
    """The parameters `metadata.KEY=VALUE` of a list. Raises `invalid_field`."""
    wanted: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name.startswith("metadata."):
            key = name.removeprefix("metadata.")
            if not METADATA_KEY.fullmatch(key) or len(wanted) >= MAX_METADATA:
                raise invalid_field(name[:80], "this is no key.", {"pattern": METADATA_KEY.pattern})
            wanted[key] = value
    return wanted


def check_size(shape: shapes.Shape, candidates: Sequence[NodeLink]) -> None:
    """Raises `invalid_field` for a size that no node could ever hold."""
    infos = [link.info for link in candidates if link.info is not None]
    for field, wanted, most in (
        ("vcpus", shape.vcpus, [info.cpus for info in infos]),
        ("memory_mib", shape.memory_mib, [info.memory_mib for info in infos]),
        ("disk_mib", shape.disk_mib, [info.disk_mib for info in infos]),
    ):
        if most and wanted > max(most):
            raise invalid_field(field, "no node here is that large.", {"type": "integer", "maximum": max(most)})


def check_caps(project: ProjectRow, shape: shapes.Shape) -> None:
    """Raises `invalid_field` for a sandbox that is larger than the project's may be."""
    for field in ("vcpus", "memory_mib", "disk_mib"):
        most = getattr(project.caps, field)
        if most is not None and getattr(shape, field) > most:
            raise invalid_field(
                field,
                f"no sandbox of the project {project.name} may be that large.",
                {"type": "integer", "maximum": most},
            )


def unknown_template(reference: str) -> Unprocessable:
    """The error of a template that is not there, or that the project may not use."""
    return Unprocessable(
        "unknown_template",
        f"There is no template {reference[:200]!r} that the project may use.",
        "GET /v1/templates lists those that there are.",
        field="template",
    )
