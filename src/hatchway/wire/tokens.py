"""Data-plane tokens: signed by the control plane, checked by every listener of a node without asking anyone.

A token is a JWT (EdDSA) bound to one session, or to one sandbox with scopes. The claims: `jti` its id (revocation names
it), `sub` the sandbox, `ses` the session (absent in a sandbox token), `prj` the project, `scp` the scopes, `gen` the
sandbox's generation when it was issued, `exp` the expiry. The header's `kid` names the key.
"""

import time
from collections.abc import Mapping

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from hatchway.domain.errors import Unauthenticated
from hatchway.domain.ids import new_id

SCOPES = ("sessions", "files", "ports")


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """What a valid token says."""

    token_id: str
    project: str
    sandbox_id: str
    session_id: str | None
    scopes: frozenset[str]
    generation: int
    expires_at: float


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
    ) -> tuple[str, float]:
        """Returns a token and its expiry (Unix seconds)."""
        expires_at = float(int(time.time() + ttl_s))
        token = self.sign(
            token_id=new_id(),
            project=project,
            sandbox_id=sandbox_id,
            generation=generation,
            expires_at=expires_at,
            session_id=session_id,
            scopes=scopes,
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
    ) -> str:
        """Returns a token with exactly these claims; `expires_at` in whole Unix seconds."""
        claims: dict[str, object] = {
            "jti": token_id,
            "prj": project,
            "sub": sandbox_id,
            "scp": sorted(scopes),
            "gen": generation,
            "exp": int(expires_at),
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
        claims = jwt.decode(token, key, algorithms=["EdDSA"], options={"require": ["exp", "jti", "sub"]})
        session = claims.get("ses")
        return Claims(
            token_id=str(claims["jti"]),
            project=str(claims["prj"]),
            sandbox_id=str(claims["sub"]),
            session_id=None if session is None else str(session),
            scopes=frozenset(map(str, claims["scp"])),
            generation=int(claims["gen"]),
            expires_at=float(claims["exp"]),
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
