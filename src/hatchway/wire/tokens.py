"""Data-plane tokens: signed by the control plane, checked by every listener of a node without asking anyone.

A token is a JWT (EdDSA) bound to one session, or to one sandbox with scopes. The claims: `jti` its id (revocation names
it), `sub` the sandbox, `ses` the session (absent in a sandbox token), `prj` the project, `scp` the scopes, `gen` the
sandbox's generation when it was issued, `iat` that moment, `exp` the expiry, `key` the API key that asked for it. The header's
`kid` names the key of the signature.
"""

import math
import time
from collections.abc import Mapping

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from hatchway.domain.errors import Unauthenticated
from hatchway.domain.ids import new_id

SCOPES = ("sessions", "files", "ports")
ARCHIVES = "archives"
"""The scope of a token for one export or upload, which it names in the place of a sandbox."""


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """What a valid token says."""

    token_id: str
    project: str
    sandbox_id: str
    session_id: str | None
    scopes: frozenset[str]
    generation: int
    expires_at: float
    issued_at: float = 0.0
    """Unix seconds with a fraction; 0 in tokens of older releases."""
    key_id: str = ""
    """The API key that the token goes back to; empty in tokens of older releases."""


class Signer:
    """Signs tokens with one private key; the control plane has one per installation."""

    def __init__(self, key: Ed25519PrivateKey, key_id: str) -> None:
        self._key = key
        self.key_id = key_id

    def issue(
        self,
        *,
        project: str,
        sandbox_id: str,
        generation: int,
        ttl_s: float,
        session_id: str | None = None,
        scopes: frozenset[str] = frozenset({"sessions"}),
        key_id: str = "",
        until: float | None = None,
    ) -> tuple[str, float]:
        """Returns a token and its expiry (Unix seconds): `ttl_s` from now, `until` at most."""
        expires_at = float(int(min(time.time() + ttl_s, until or math.inf)))
        token = self.sign(
            token_id=new_id(),
            project=project,
            sandbox_id=sandbox_id,
            generation=generation,
            expires_at=expires_at,
            session_id=session_id,
            scopes=scopes,
            key_id=key_id,
        )
        return token, expires_at

    def sign(
        self,
        *,
        token_id: str,
        project: str,
        sandbox_id: str,
        generation: int,
        expires_at: float,
        session_id: str | None = None,
        scopes: frozenset[str],
        key_id: str = "",
    ) -> str:
        """Returns a token with exactly these claims, issued now; `expires_at` in whole Unix seconds."""
        claims: dict[str, object] = {
            "jti": token_id,
            "prj": project,
            "sub": sandbox_id,
            "scp": sorted(scopes),
            "gen": generation,
            "iat": time.time(),
            "exp": int(expires_at),
            "key": key_id,
        }
        if session_id is not None:
            claims["ses"] = session_id
        return jwt.encode(claims, self._key, algorithm="EdDSA", headers={"kid": self.key_id})


def verify(token: str, keys: Mapping[str, Ed25519PublicKey]) -> Claims:
    """Checks signature and expiry, raises `Unauthenticated` with `token_expired` or `token_invalid`."""
    try:
        key_id = jwt.get_unverified_header(token).get("kid")
        key = keys.get(key_id) if isinstance(key_id, str) else None
        if key is None:
            raise jwt.InvalidTokenError("unknown key")
        # The clock of a node may be behind the control plane's: that a token seems not yet issued says nothing against it.
        claims = jwt.decode(
            token, key, algorithms=["EdDSA"], options={"require": ["exp", "jti", "sub"], "verify_iat": False}
        )
        session = claims.get("ses")
        return Claims(
            token_id=str(claims["jti"]),
            project=str(claims["prj"]),
            sandbox_id=str(claims["sub"]),
            session_id=None if session is None else str(session),
            scopes=frozenset(map(str, claims["scp"])),
            generation=int(claims["gen"]),
            expires_at=float(claims["exp"]),
            issued_at=float(claims.get("iat", 0.0)),
            key_id=str(claims.get("key", "")),
        )
    except jwt.ExpiredSignatureError:
        raise Unauthenticated(
            "token_expired",
            "The token has expired.",
            "Ask the control plane for a new one: POST /v1/sessions/{id}/token or POST /v1/sandboxes/{id}/tokens.",
        ) from None
    except (jwt.InvalidTokenError, KeyError, TypeError, ValueError):
        raise Unauthenticated(
            "token_invalid",
            "The token is not one of this installation.",
            "Use one that the control plane gave you.",
        ) from None
