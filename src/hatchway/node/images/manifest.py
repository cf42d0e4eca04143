"""What a template release is: its parts with their digests, and the digest of it all that names it."""

import hashlib
import re

import msgspec

from hatchway.domain.errors import InvalidRequest

FORMAT = 1
MANIFEST_FILE = "manifest.json"
MAX_MANIFEST = 1 << 20

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

DEFAULT_TAG = "latest"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a release; `sha256` covers all of its octets."""

    file: str
    sha256: str
    size_bytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a release's manifest.json. `parts` has at least `kernel`, `initrd`, `base` and `upper`."""

    format: int
    name: str
    tag: str
    description: str
    architecture: str
    kernel_release: str
    cmdline: str
    parts: dict[str, Part]
    made_of: dict[str, str]
    """Where it came from: distribution, kernel packages, digest of the agent."""
    created_at: float
    """Unix seconds; not part of the digest."""

    def digest(self) -> str:
        """Returns `sha256:…` of the manifest without its time, in canonical JSON: sorted keys, no spaces, UTF-8."""
        members = msgspec.to_builtins(self)
        del members["created_at"]
        return f"sha256:{hashlib.sha256(msgspec.json.encode(members, order='deterministic')).hexdigest()}"

    def encode(self) -> bytes:
        """Returns what manifest.json holds."""
        return msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=2) + b"\n"


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A template reference that was parsed: either `tag` or `digest` is set."""

    name: str
    tag: str | None = None
    digest: str | None = None


def parse_reference(text: str) -> Reference:
    """Parses `name`, `name:tag` or `name@sha256:…`. Raises `InvalidRequest("malformed_template")`."""
    name, at, digest = text.partition("@")
    if at:
        if is_name(name) and is_digest(digest):
            return Reference(name=name, digest=digest)
    else:
        name, colon, tag = text.partition(":")
        if is_name(name) and (is_tag(tag) if colon else True):
            return Reference(name=name, tag=tag if colon else DEFAULT_TAG)
    raise InvalidRequest(
        "malformed_template",
        f"{text[:200]!r} is not a template reference.",
        "Write name, name:tag or name@sha256:DIGEST, for example seed:latest.",
    )


def is_name(text: str) -> bool:
    """Tells whether `text` can be a template's name: up to 63 of `[a-z0-9._-]`, first and last a letter or digit."""
    return _NAME.fullmatch(text) is not None


def is_tag(text: str) -> bool:
    """Tells whether `text` can be a tag: up to 128 of `[A-Za-z0-9._-]`, not starting with a dot or dash."""
    return _TAG.fullmatch(text) is not None


def is_digest(text: str) -> bool:
    """Tells whether `text` has the form of a release's digest."""
    return _DIGEST.fullmatch(text) is not None
