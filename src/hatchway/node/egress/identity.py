"""What the node keeps of a sandbox's way out: its policy, the key of its authority, its placeholders.

Kept beside the record, so that a node which was restarted serves the sandbox again by itself, whatever has become of the control plane.
Nothing here is a secret of anybody else's: the key vouches for this sandbox alone, and a placeholder is worth nothing elsewhere.
"""

import secrets
from collections.abc import Iterable
from pathlib import Path

import msgspec

from hatchway.domain.errors import Internal
from hatchway.wire.egress import EgressSpec
from hatchway.wire.small_files import replace_file

FILE = "egress.json"
PLACEHOLDER_BITS = 128


class Identity(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """See the module."""

    egress: EgressSpec = EgressSpec(revision=0)
    """The policy that is to hold; the one that a gateway accepted last where it refused a newer one."""
    ca_key: bytes = b""
    """PKCS #8 DER; the same for the life of a sandbox, so that programs which trust its authority go on. Empty: not made yet."""
    placeholders: dict[str, str] = msgspec.field(default_factory=dict)
    """Credential id → what the guest has in its place, since the machine was made to run last."""


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


def fresh(credentials: Iterable[tuple[str, str]], kept: dict[str, str] | None = None) -> dict[str, str]:
    """A placeholder for each credential id and prefix; those in `kept` stay."""
    known = kept or {}
    return {name: known.get(name) or prefix + secrets.token_hex(PLACEHOLDER_BITS // 8) for name, prefix in credentials}
