"""What the roles would each set up for themselves, done once in the process that they are forked from.

OpenSSL makes its tables at the first key, certificate and handshake: 9 MiB, which every role that waited with it would have to itself. The
keys made here sign nothing that anybody trusts, and are forgotten.
"""

import datetime
import hashlib
import ssl

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from hatchway.egress.authority import Authority

_NAME = "warming.invalid"


def warm() -> None:
    """Makes a key, an authority and a leaf of it, shakes hands with itself, signs, seals."""
    now = datetime.datetime.now(datetime.UTC)
    authority = Authority(b"", _NAME, (_NAME,), now)
    Authority(authority.key, _NAME, (_NAME,), now)
    _shake_hands(authority.context(_NAME, ("http/1.1",), now), authority.certificate)
    key = Ed25519PrivateKey.generate()
    key.public_key().verify(key.sign(b""), b"")
    sealer = AESGCM(AESGCM.generate_key(256))
    sealer.decrypt(bytes(12), sealer.encrypt(bytes(12), b"", None), None)
    hashlib.sha256(b"").digest()


def _shake_hands(server_context: ssl.SSLContext, trusted: str) -> None:
    client_context = ssl.create_default_context(cadata=trusted)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    client = client_context.wrap_bio(to_client, to_server, server_hostname=_NAME)
    left = [client, server]
    while left:
        for side in tuple(left):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            left.remove(side)
