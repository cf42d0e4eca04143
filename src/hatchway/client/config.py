"""Where the service is and with which key to call it."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from .errors import ConnectionFailed, InvalidRequest

DEFAULT_URL = "http://127.0.0.1:7070"
MAX_CONNECTIONS = 1000
"""Connections that one client opens at most: one per stream that is being read, and a few for requests."""
_MAX_FILE = 64 * 1024
_IPV4_LOOPBACK = re.compile(r"127(\.[0-9]{1,3}){3}")


@dataclass(frozen=True, slots=True)
class Config:
    """What a client needs to know: base URL of the API without a slash at its end, and the key, if there is one.

    `ca` is a file in PEM with the authorities that are trusted instead of the system's.
    """

    url: str
    key: str | None
    ca: str | None = None
    also_ca: str | None = None
    """A file in PEM with more of them: the system's, or those of `ca`, are trusted too. A server's own certificate will do."""
    socket: str | None = None
    """Path of a Unix socket that the API is reached over instead of the URL's host."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """What every request to the API carries, and no other."""
    connections: int = MAX_CONNECTIONS
    """How many there may be at once, to the API and to nodes each."""


class _Endpoint(msgspec.Struct):
    api: str


def data_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the data folder of the service on this machine: `HATCHWAY_DATA_DIR`, else the default of this user."""
    if configured := environ.get("HATCHWAY_DATA_DIR"):
        return Path(configured)
    if os.geteuid() == 0:
        return Path("/var/lib/hatchway")
    if shared := environ.get("XDG_DATA_HOME"):
        return Path(shared) / "hatchway"
    return Path(environ.get("HOME") or Path.home()) / ".local" / "share" / "hatchway"


def find(
    url: str | None = None,
    key: str | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    ca: str | None = None,
) -> Config:
    """Finds URL and key: what was given, else `HATCHWAY_URL` and `HATCHWAY_API_KEY`, else the files of the data folder.
    `HATCHWAY_CA_FILE` names the authorities to trust where they are not the system's.

    The development key of the data folder is used only for the service of that folder: for the URL that the folder names,
    or a loopback URL; it is never sent to another machine. Raises `InvalidRequest("bad_url")` for a URL that is not HTTP,
    and `ConnectionFailed` for a file that is there and cannot be read.
    """
    folder = data_folder(environ)
    url = url or environ.get("HATCHWAY_URL") or None
    key = key or environ.get("HATCHWAY_API_KEY") or None
    local: str | None = None
    if url is None:
        local = _endpoint(folder / "endpoint.json")
        url = local or DEFAULT_URL
    url = url.rstrip("/")
    host = _host(url)
    if key is None and (local is not None or is_loopback(host)):
        content = _read(folder / "dev.key")
        key = content.decode("ascii", "replace").strip() or None if content is not None else None
    return Config(url, key, ca or environ.get("HATCHWAY_CA_FILE") or None)


def is_loopback(host: str) -> bool:
    """Tells whether `host`, a name or an address without brackets, is this machine by definition."""
    return host in ("localhost", "::1") or host.endswith(".localhost") or _IPV4_LOOPBACK.fullmatch(host) is not None


def _host(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port  # raises for a port that is no number
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise InvalidRequest(
            "bad_url",
            f"{url!r} is not the URL of an HTTP service.",
            f"Give one like {DEFAULT_URL} by --url or HATCHWAY_URL.",
        )
    return parts.hostname


def _endpoint(path: Path) -> str | None:
    content = _read(path)
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=_Endpoint).api
    except msgspec.DecodeError as error:
        raise ConnectionFailed(
            f"{path} is damaged: {error}", "Start the service again (hatchway up), or set HATCHWAY_URL.", sent=False
        ) from None


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConnectionFailed(
            f"{path} cannot be read: {error.strerror}",
            "Run as the user of the service, or set HATCHWAY_URL and HATCHWAY_API_KEY.",
            code="key_unreadable",
            sent=False,
        ) from None
