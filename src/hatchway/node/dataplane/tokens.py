"""Who may use the data plane: checks the tokens of `wire.tokens` against what the control plane pushed."""

from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from hatchway.domain.errors import Forbidden, Unauthenticated
from hatchway.wire.node import Configure
from hatchway.wire.tokens import Claims, verify

MAX_TOKEN = 4_096
"""Octets of a token; ours have some 400."""
RENEW = "POST /v1/sessions/{id}/token and POST /v1/sandboxes/{id}/tokens on the control plane give tokens."


class TokenChecker:
    """Keys, revoked tokens and least generations, as of the last `configure`. Before the first one nobody is let in."""

    def __init__(self) -> None:
        self._keys: dict[str, Ed25519PublicKey] = {}
        self._revoked: frozenset[str] = frozenset()
        self._revoked_keys: frozenset[str] = frozenset()
        self._cutoffs: dict[str, float] = {}
        self._generations: dict[str, int] = {}
        self._listeners: list[Callable[[], None]] = []
        self._generation_listeners: list[Callable[[str, int], None]] = []

    def configure(self, message: Configure) -> None:
        """Takes over keys and revocations; streams that were opened with a token that is revoked now are ended."""
        self._keys = {key.key_id: Ed25519PublicKey.from_public_bytes(key.public) for key in message.token_keys}
        before = (self._revoked, self._revoked_keys, self._cutoffs)
        self._revoked, self._revoked_keys = frozenset(message.revoked), frozenset(message.revoked_keys)
        self._cutoffs = dict(message.cutoffs)
        if before != (self._revoked, self._revoked_keys, self._cutoffs):
            for listener in self._listeners:
                listener()

    def on_revoked(self, listener: Callable[[], None]) -> None:
        """Calls `listener` when other tokens than before are revoked; `is_revoked` tells which."""
        self._listeners.append(listener)

    def is_revoked(self, claims: Claims) -> bool:
        """Whether the token itself, the key that it goes back to, or all older tokens of its sandbox were revoked."""
        return (
            claims.token_id in self._revoked
            or (claims.key_id != "" and claims.key_id in self._revoked_keys)
            or claims.issued_at <= self._cutoffs.get(claims.sandbox_id, -1.0)
        )

    def require_generation(self, sandbox_id: str, generation: int) -> None:
        """Refuses tokens of this sandbox that were issued for an older generation, and ends what was opened with them; 0 forgets the sandbox."""
        if generation <= 0:
            self._generations.pop(sandbox_id, None)
        elif generation != self._generations.get(sandbox_id):
            self._generations[sandbox_id] = generation
            for listener in self._generation_listeners:
                listener(sandbox_id, generation)

    def on_generation(self, listener: Callable[[str, int], None]) -> None:
        """Calls `listener` with a sandbox and the least generation that its tokens must have from now on."""
        self._generation_listeners.append(listener)

    def check(self, authorization: str | None) -> Claims:
        """Reads an `Authorization` header. Raises `Unauthenticated` (`token_missing invalid expired revoked superseded`)."""
        scheme, _, token = (authorization or "").partition(" ")
        return self.check_token(token.strip() if scheme.lower() == "bearer" else "")

    def check_token(self, token: str, where: str = "`Authorization: Bearer TOKEN`") -> Claims:
        """Checks a token as such; `where` is how the caller may send one. Raises what `check` does."""
        if not token:
            raise Unauthenticated("token_missing", "The request carries no token.", f"Send {where}; {RENEW}")
        if len(token) > MAX_TOKEN:
            raise Unauthenticated("token_invalid", "The token is too long to be one.", f"Send another one; {RENEW}")
        claims = verify(token, self._keys)
        if self.is_revoked(claims):
            raise Unauthenticated("token_revoked", "The token was revoked.", f"Ask for a new one; {RENEW}")
        if claims.generation < self._generations.get(claims.sandbox_id, 0):
            raise Unauthenticated(
                "token_superseded",
                "The token was issued for an earlier life of the sandbox.",
                f"Ask for a new one; {RENEW}",
            )
        return claims


def may_use_session(claims: Claims, session_id: str) -> None:
    """Checks the session that a token names, before it is looked up. Raises `Forbidden("wrong_session")`."""
    if claims.session_id is not None and claims.session_id != session_id:
        raise Forbidden("wrong_session", "The token is for another session.", "Use the token of this session.")
    if claims.session_id is None:
        may_use_scope(claims, "sessions")


def may_use_scope(claims: Claims, scope: str) -> None:
    """Checks that a token is one of a sandbox with this scope. Raises `Forbidden("wrong_scope")`."""
    if claims.session_id is not None:
        raise Forbidden(
            "wrong_scope",
            "The token is for one session only.",
            f"Ask for a token of the sandbox: POST /v1/sandboxes/{{id}}/tokens with the scope `{scope}`.",
        )
    if scope not in claims.scopes:
        raise Forbidden("wrong_scope", f"The token does not have the scope `{scope}`.", "Ask for one with that scope.")


def is_for(claims: Claims, sandbox_id: str, project: str | None) -> bool:
    """Whether a token is for this sandbox of this project (None: the sandbox is not here, which is said later)."""
    return claims.sandbox_id == sandbox_id and project in (None, claims.project)


def may_use_sandbox(claims: Claims, sandbox_id: str, project: str | None) -> None:
    """Checks that a token is for this sandbox of this project (None: the sandbox is not here, which is said later). Raises `Forbidden("wrong_sandbox")`."""
    if not is_for(claims, sandbox_id, project):
        raise Forbidden("wrong_sandbox", "The token is for another sandbox.", "Use a token of this sandbox.")
