"""The key that this installation signs its archives with, and those of others that it trusts."""

from collections.abc import Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from hatchway.domain.errors import HatchwayError, Unprocessable
from hatchway.domain.ids import new_id
from hatchway.storage import settings
from hatchway.storage.database import Connection
from hatchway.wire.node import TokenKey

SETTING = "archive_key"


def ensure(connection: Connection) -> None:
    """Makes the installation's key the first time. It lies in the database, which only we can read."""
    if settings.get(connection, SETTING) is None:
        private = Ed25519PrivateKey.generate().private_bytes_raw().hex()
        settings.put(connection, SETTING, {"id": new_id(), "private": private})


def own(connection: Connection) -> tuple[str, Ed25519PrivateKey]:
    """Id and private key of the installation."""
    stored = settings.get(connection, SETTING)
    assert stored is not None, "`ensure` comes first"
    return stored["id"], Ed25519PrivateKey.from_private_bytes(bytes.fromhex(stored["private"]))


def shown(key_id: str, key: Ed25519PrivateKey) -> str:
    """What another installation has to be told to trust this one: `ID:PUBLIC`, in hex."""
    return f"{key_id}:{key.public_key().public_bytes_raw().hex()}"


def trusted(connection: Connection, configured: Sequence[str]) -> tuple[TokenKey, ...]:
    """The keys whose archives are taken in: the own one, and those that are configured as `shown` shows them."""
    key_id, key = own(connection)
    mine = TokenKey(key_id=key_id, public=key.public_key().public_bytes_raw())
    return (mine, *(parse(one) for one in configured))


def parse(text: str) -> TokenKey:
    """Reads a key as `shown` shows it. Raises `Unprocessable("config_invalid")`."""
    key_id, _, public = text.partition(":")
    try:
        octets = bytes.fromhex(public)
        Ed25519PublicKey.from_public_bytes(octets)
    except ValueError:
        raise invalid(text) from None
    if not key_id.isalnum():
        raise invalid(text)
    return TokenKey(key_id=key_id, public=octets)


def invalid(text: str) -> HatchwayError:
    """The error of a trusted key that is none."""
    return Unprocessable(
        "config_invalid",
        f"{text[:100]!r} in `trusted_keys` is no key.",
        "Write what `signed_by` of an export of the other installation says.",
    )
