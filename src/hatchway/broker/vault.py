"""HashiCorp Vault, KV version 2: one field of a secret, by a token or by AppRole.

The HTTP API as its documentation describes it: `POST /v1/auth/MOUNT/login`, `POST /v1/auth/token/renew-self`, `GET /v1/MOUNT/data/PATH`;
`X-Vault-Token`, `X-Vault-Namespace`. Redirects are not followed: a standby answers one, and the token is not for whoever it names.
"""

import asyncio
import logging
import re
import ssl
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec

from hatchway.broker.config import VaultServer
from hatchway.broker.secret import without_line_end
from hatchway.broker.store import read_private
from hatchway.domain.errors import HatchwayError, Unavailable, Unprocessable
from hatchway.wire.broker import VaultPath

MAX_ANSWER = 1 << 20
RENEW_AT = 2 / 3
"""Of a token's life."""

_SEGMENT = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9_.@=+~ -]{1,128}")
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

log = logging.getLogger(__name__)


def check_path(path: VaultPath) -> None:
    """Raises `Unprocessable("vault_path")` for what names no secret."""
    segments = [*path.mount.split("/"), *path.path.split("/")]
    if len(segments) > 32 or not all(_SEGMENT.fullmatch(segment) for segment in segments):
        raise Unprocessable(
            "vault_path",
            "Mount or path of the Vault secret is none.",
            "Give them without slashes at the ends, such as `secret` and `team/api`.",
        )
    if not 1 <= len(path.field) <= 256 or not path.field.isprintable():
        raise Unprocessable(
            "vault_path", "The field of the Vault secret has no proper name.", "Give the name of one field."
        )


class Vault:
    """One server, with the token that we have of it."""

    def __init__(self, name: str, config: VaultServer) -> None:
        """Raises `Unprocessable("vault_address")`, and `OSError` or `ssl.SSLError` for its CA file."""
        self._name = name
        self._config = config
        parts = urlsplit(config.address)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
            raise self._wrong("The address is no URL of a server.")
        if parts.scheme == "http" and parts.hostname not in _LOOPBACK:
            raise self._wrong("The address is in clear, and not on loopback.")
        if config.token_file is None and (config.role_id_file is None or config.secret_id_file is None):
            raise self._wrong("There is neither a token nor an AppRole.")
        self._base = f"{parts.scheme}://{parts.netloc}"
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context(cafile=config.ca_file)
            self._tls.minimum_version = ssl.TLSVersion.TLSv1_2
        self._token = ""
        self._renew_at = self._token_ends = 0.0
        self._lock = asyncio.Lock()

    async def read(self, path: VaultPath) -> bytes:
        """The field's text. Raises `Unavailable` with `vault_unreachable`, `vault_denied`, `vault_sealed`, `vault_no_secret`."""
        import httpx  # late: most installations have no Vault

        try:
            async with (
                asyncio.timeout(self._config.within_s),
                httpx.AsyncClient(
                    verify=self._tls if self._tls is not None else False,
                    trust_env=False,
                    follow_redirects=False,
                    timeout=self._config.within_s,
                ) as client,
            ):
                return await self._read(client, path)
        except (httpx.HTTPError, TimeoutError, OSError, ssl.SSLError) as error:
            # The kind alone: the text of some errors quotes what was sent.
            raise self._failed(
                "vault_unreachable",
                f"it does not answer ({type(error).__name__})",
                "See that it runs and its certificate fits.",
            ) from None

    async def _read(self, client: Any, path: VaultPath) -> bytes:
        where = f"/v1/{path.mount}/data/{path.path}"
        for attempt in range(2):
            token = await self._current_token(client, anew=attempt > 0)
            status, body = await self._call(client, "GET", where, token)
            if status != 403 or self._config.token_file is not None:
                break
        if status == 403:
            raise self._failed(
                "vault_denied", "it does not let us read this path", "Give our policy there `read` on it."
            )
        fields = body.get("data") if isinstance(body, dict) else None
        fields = fields.get("data") if isinstance(fields, dict) else None
        if status == 404 or (status == 200 and not isinstance(fields, dict)):
            raise self._failed(
                "vault_no_secret", "there is no such secret, or its version was deleted", "Write it there."
            )
        self._require(status)
        assert isinstance(fields, dict)
        value = fields.get(path.field)
        if not isinstance(value, str):
            raise self._failed("vault_no_secret", "the secret has no such field with a text", "Write it there.")
        return without_line_end(value.encode("utf-8", "replace"))

    async def _current_token(self, client: Any, *, anew: bool) -> str:
        async with self._lock:
            now = time.monotonic()
            if self._config.token_file is not None:
                self._token = _line(self._config.token_file)
                if now >= self._renew_at:
                    await self._renew(client)
            else:
                dead = anew or not self._token or now >= self._token_ends
                if dead or (now >= self._renew_at and not await self._renew(client)):
                    await self._login(client)
            return self._token

    async def _login(self, client: Any) -> None:
        assert self._config.role_id_file is not None
        assert self._config.secret_id_file is not None
        role = {"role_id": _line(self._config.role_id_file), "secret_id": _line(self._config.secret_id_file)}
        status, body = await self._call(client, "POST", f"/v1/auth/{self._config.auth_mount}/login", None, role)
        if status in (400, 403):
            raise self._failed("vault_denied", "it does not take the AppRole", "See that role and secret id are valid.")
        self._require(status)
        self._take(body)

    async def _renew(self, client: Any) -> bool:
        """Prolongs the token; one that cannot be prolonged is used until it ends."""
        status, body = await self._call(client, "POST", "/v1/auth/token/renew-self", self._token, {})
        if status == 200:
            self._take(body)
            return True
        self._renew_at = time.monotonic() + self._config.refresh_s
        return False

    def _take(self, body: Any) -> None:
        auth = body.get("auth") if isinstance(body, dict) else None
        if not isinstance(auth, dict) or not isinstance(auth.get("client_token"), str):
            raise self._failed(
                "vault_unreachable", "its answer has no token", "See that the address is that of a Vault."
            )
        self._token = auth["client_token"]
        life = auth.get("lease_duration")
        life = float(life) if isinstance(life, int | float) and life > 0 else 365 * 24 * 3600.0
        now = time.monotonic()
        self._renew_at, self._token_ends = now + life * RENEW_AT, now + life

    async def _call(
        self, client: Any, method: str, path: str, token: str | None, body: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        headers = {"X-Vault-Request": "true"}
        if token:
            headers["X-Vault-Token"] = token
        if self._config.namespace:
            headers["X-Vault-Namespace"] = self._config.namespace
        content = b""
        async with client.stream(method, self._base + path, headers=headers, json=body) as answer:
            async for part in answer.aiter_bytes():
                content += part
                if len(content) > MAX_ANSWER:
                    raise self._failed(
                        "vault_unreachable", "its answer is too long", "See that the address is that of a Vault."
                    )
            status = int(answer.status_code)
        try:
            return status, msgspec.json.decode(content) if content else None
        except msgspec.MsgspecError:
            return status, None

    def _require(self, status: int) -> None:
        if status == 503:
            raise self._failed("vault_sealed", "it is sealed or not initialized", "Unseal it.")
        if status != 200:
            raise self._failed("vault_unreachable", f"it answers {status}", "See its log.")

    def _failed(self, code: str, cause: str, remedy: str) -> HatchwayError:
        return Unavailable(code, f"The Vault {self._name}: {cause}.", remedy)

    def _wrong(self, cause: str) -> HatchwayError:
        return Unprocessable(
            "vault_address", f"The Vault {self._name} is not configured right. {cause}", "See docs/credentials.md."
        )


def _line(file: Any) -> str:
    return read_private(file).decode("ascii", "replace").strip()
