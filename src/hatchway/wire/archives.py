"""What control plane and node have to agree on about archives: the octets that are signed."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_DOMAIN = b"hatchway archive\0"
"""Before the head: a signature of an archive is never one of anything else."""


def sign(key: Ed25519PrivateKey, head: bytes) -> bytes:
    """The signature of an archive's head: 64 octets."""
    return key.sign(_DOMAIN + head)


def verify(key: Ed25519PublicKey, signature: bytes, head: bytes) -> None:
    """Raises `cryptography.exceptions.InvalidSignature`."""
    key.verify(signature, _DOMAIN + head)
