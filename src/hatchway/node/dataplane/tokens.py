"""Who may use the data plane: checks the tokens of `wire.tokens` against what the control plane pushed."""

from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from hatchway.domain.errors import Forbidden, Unauthenticated
from hatchway.wire.node import Configure
from hatchway.wire.tokens import Claims, verify

_MAX_TOKEN = 4_096


class TokenChecker:
    """Keys, revoked tokens and least generations, as of the last `configure`. Before the first one nobody is let in."""

    def __init__(self) -> None:
        self._keys: dict[str, Ed25519PublicKey] = {}
        self._revoked: frozenset[str] = frozenset()
        self._generations: dict[str, int] = {}
        self._listeners: list[Callable[[frozenset[str]], None]] = []

    def configure(self, message: Configure) -> None:
        """Takes over keys and revocations; streams that were opened with a token that is revoked now are ended."""
        self._keys = {key.key_id: Ed25519PublicKey.from_public_bytes(key.public) for key in message.token_keys}
        revoked = frozenset(message.revoked)
        fresh, self._revoked = revoked - self._revoked, revoked
        if fresh:
            for listener in self._listeners:
                listener(fresh)

    def on_revoked(self, listener: Callable[[frozenset[str]], None]) -> None:
        """Calls `listener` with the ids of tokens that have just been revoked."""
        self._listeners.append(listener)

    def require_generation(self, sandbox_id: str, generation: int) -> None:
        """Refuses tokens of this sandbox that were issued for an older generation; 0 forgets the sandbox."""
        if generation > 0:
            self._generations[sandbox_id] = generation
        else:
            self._generations.pop(sandbox_id, None)

    def check(self, authorization: str | None) -> Claims:
        """Reads an `Authorization` header. Raises `Unauthenticated` (`token_missing invalid expired revoked superseded`)."""
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated(
                "token_missing",
                "The request carries no token.",
                "Send `Authorization: Bearer TOKEN` with the token of the session.",
            )
        if len(token) > _MAX_TOKEN:
            raise Unauthenticated("token_invalid", "The token is too long to be one.", "Use the token of the session.")
        claims = verify(token, self._keys)
        if claims.token_id in self._revoked:
            raise Unauthenticated(
                "token_revoked", "The token was revoked.", "Ask for a new one: POST /v1/sessions/{id}/token."
            )
        if claims.generation < self._generations.get(claims.sandbox_id, 0):
            raise Unauthenticated(
                "token_superseded",
                "The token was issued for an earlier life of the sandbox.",
                "Ask for a new one: POST /v1/sessions/{id}/token.",
            )
        return claims


def may_use_session(claims: Claims, session_id: str) -> None:
    """Checks the session that a token names, before it is looked up. Raises `Forbidden("wrong_session")`."""
    if claims.session_id is not None and claims.session_id != session_id:
        raise Forbidden("wrong_session", "The token is for another session.", "Use the token of this session.")
    if claims.session_id is None and "sessions" not in claims.scopes:
        raise Forbidden(
            "wrong_scope", "The token does not have the scope `sessions`.", "Ask for a token with that scope."
        )


def may_use_sandbox(claims: Claims, sandbox_id: str, project: str) -> None:
    """Checks that a token is for this sandbox of this project. Raises `Forbidden("wrong_sandbox")`."""
    if claims.sandbox_id != sandbox_id or claims.project != project:
        raise Forbidden("wrong_sandbox", "The token is for another sandbox.", "Use a token of this sandbox.")
