"""What the node keeps of a sandbox's way out: its policy, the key of its authority, its placeholders.

Kept beside the record, so that a node which was restarted serves the sandbox again by itself, whatever has become of the control plane.
Nothing here is a secret of anybody else's: the key vouches for this sandbox alone, and a placeholder is worth nothing elsewhere.
"""

import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from hatchway.domain.errors import Internal
from hatchway.wire.egress import EgressSpec
from hatchway.wire.small_files import replace_file

FILE = "egress.json"
PLACEHOLDER_BITS = 128


class Wanted(NamedTuple):
    """A credential that has to have a placeholder."""

    credential_id: str
    origin: str
    """`tier/document/id`, which stays the same where its id among all documents does not."""
    prefix: str


class Identity(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """See the module."""

    egress: EgressSpec = EgressSpec(revision=0)
    """The policy that is to hold; the one that a gateway accepted last where it refused a newer one."""
    ca_key: bytes = b""
    """PKCS #8 DER; the same for the life of a sandbox, so that programs which trust its authority go on. Empty: not made yet."""
    placeholders: dict[str, str] = msgspec.field(default_factory=dict)
    """Credential id → what the guest has in its place, since the machine was made to run last."""
    origins: dict[str, str] = msgspec.field(default_factory=dict)
    """Credential id → which credential that is, whatever it is called (`Wanted.origin`)."""


def read(folder: Path) -> Identity:
    """What was kept; nothing at all where there is no file. Raises `OSError`, and `Internal("egress_damaged")` for one that cannot be read."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=Identity)
    except FileNotFoundError:
        return Identity()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Internal("egress_damaged", f"{folder / FILE} cannot be read: {error}", "Set its policy anew.") from error


def write(folder: Path, identity: Identity) -> None:
    """Keeps it, 0600. Raises `OSError`. It outlives this process; after the end of the host it is made anew where it is lacking."""
    replace_file(folder / FILE, msgspec.json.encode(identity), mode=0o600, durable=False)


def with_placeholders(identity: Identity, credentials: Iterable[Wanted], kept: Identity | None = None) -> Identity:
    """The identity with a placeholder for each of the credentials; one that has one in `kept` keeps it, by whatever id it was called there.

    So a placeholder stands for the same credential as long as it is good: a document that comes to be does not take over what programs hold.
    """
    names = {} if kept is None else kept.origins
    known = {} if kept is None else {names.get(name, name): text for name, text in kept.placeholders.items()}
    placeholders, origins = {}, {}
    for one in credentials:
        # What was kept before origins were has its id alone.
        found = known.get(one.origin) or known.get(one.credential_id)
        placeholders[one.credential_id] = found or one.prefix + secrets.token_hex(PLACEHOLDER_BITS // 8)
        origins[one.credential_id] = one.origin
    return msgspec.structs.replace(identity, placeholders=placeholders, origins=origins)
