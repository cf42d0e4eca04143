"""What a request is for: the API, or a port of a sandbox. One origin serves both.

A host name `PORT-ID.DOMAIN` says it; under any other host the headers `E2b-Sandbox-Id` and `E2b-Sandbox-Port` do; what has neither is for
the API. Of a domain that is ours all names have a meaning: `api.DOMAIN` is the API whatever the headers are, `sandbox.DOMAIN` goes by the headers
alone, what is none of a port is refused.

Some SDKs (2.20 after `AsyncSandbox.connect`) send neither name nor headers with one URL for everything, but the sandbox's token: it says which
sandbox it is for, and is for commands and files alone.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hatchway.e2b.errors import E2bError

SANDBOX_ID = "e2b-sandbox-id"
SANDBOX_PORT = "e2b-sandbox-port"
API_KEY = "x-api-key"
ACCESS_TOKEN = "x-access-token"
API, SHARED = "api", "sandbox"
"""Labels under a domain of ours."""
ENVD_PORT = 49983
"""Where an SDK believes that the agent of a sandbox listens: commands and files."""

_LABEL = re.compile(r"([0-9]{1,5})-([a-z0-9]{1,64})(?:-[a-z0-9]{1,64})?\.")
_ID = re.compile(r"[a-z0-9]{1,64}")


def first_of_each(fields: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers of a request as ASGI has them: the first of each name, which is in lower case."""
    found: dict[str, str] = {}
    for name, value in fields:
        found.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return found


@dataclass(frozen=True, slots=True)
class Target:
    """A port of a sandbox. `by_host`: the host name says it, not headers."""

    sandbox_id: str
    port: int
    by_host: bool

    @property
    def envd(self) -> bool:
        """Whether it is for commands and files."""
        return self.port == ENVD_PORT


def target(
    headers: Mapping[str, str],
    domains: tuple[str, ...] = (),
    of_token: Callable[[str], str | None] = lambda _: None,
) -> Target | None:
    """The sandbox that a request is for, None for the API; names of `headers` are in lower case. Raises `E2bError` 400.

    `domains` are ours, in lower case and without a port; `of_token` gives the sandbox of a token that is good.
    """
    host = _name(headers.get("host", ""))
    if match := _LABEL.match(host):
        return Target(match[2], _port(match[1]), by_host=True)
    label = next((host.removesuffix(f".{domain}") for domain in domains if host.endswith(f".{domain}")), None)
    if label == API:
        return None
    if label not in (None, SHARED):
        raise E2bError(400, "Invalid host")
    sandbox_id, port = headers.get(SANDBOX_ID), headers.get(SANDBOX_PORT)
    if sandbox_id is None and port is None:
        token = headers.get(ACCESS_TOKEN)
        found = of_token(token) if token is not None and API_KEY not in headers else None
        if found is not None:
            return Target(found, ENVD_PORT, by_host=False)
        if label == SHARED:
            raise E2bError(400, "missing header: E2b-Sandbox-Id")
        return None
    if sandbox_id is None or port is None:
        missing = "E2b-Sandbox-Id" if sandbox_id is None else "E2b-Sandbox-Port"
        raise E2bError(400, f"missing header: {missing}")
    return Target(plain_id(sandbox_id), _port(port), by_host=False)


def is_for_api(target: Target, path: str, headers: Mapping[str, str]) -> bool:
    """Whether a request that names a sandbox is for the API all the same: SDKs of the generation of 2.20 name it so, beside their key, when they
    connect to it. The agent has nothing at these paths."""
    return (
        target.envd and not target.by_host and API_KEY in headers and path.startswith(("/sandboxes/", "/v2/sandboxes/"))
    )


def _name(host: str) -> str:
    """A `Host` without its port, in lower case and without a dot at its end."""
    name, colon, port = host.strip().lower().rpartition(":")
    return (name if colon and port.isdecimal() else host.strip().lower()).removesuffix(".")


def plain_id(text: str) -> str:
    """The id of a sandbox, as old SDKs send it too: `id-clientID`. Raises `E2bError` 400."""
    sandbox_id = text.partition("-")[0].lower()
    if not _ID.fullmatch(sandbox_id):
        raise E2bError(400, "Invalid sandbox ID")
    return sandbox_id


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65_535):
        raise E2bError(400, "Invalid sandbox port")
    return int(text)
