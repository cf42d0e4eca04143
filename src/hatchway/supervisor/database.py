"""Which database the control plane works on, and the password that it needs for one on a server.

A password stands in no URL: URLs end up in lists of processes, settings that many can read, and logs.
"""

import ipaddress
import os
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, urlsplit

from hatchway.domain.errors import Forbidden, Unprocessable
from hatchway.supervisor.configuration import check_file
from hatchway.supervisor.settings import Settings
from hatchway.wire import handed

PASSWORD = "HATCHWAY_DATABASE_PASSWORD"
VARIABLES = (PASSWORD, "PGPASSWORD")
"""Variables with the password, ours before libpq's. A service takes them out of its environment."""
MAX_PASSWORD = 4_096
CHECKED_BY_TLS = ("verify-full", "verify-ca")


def check(settings: Settings) -> None:
    """Raises `Unprocessable("database_url_invalid")`, and in production `Forbidden("database_unprotected")` for a server on another host without TLS."""
    if settings.database_url is None:
        return
    url, query = _parts(settings.database_url)
    if not settings.production or _is_local(url.hostname, query):
        return
    mode = query.get("sslmode", [""])[-1]
    if mode not in CHECKED_BY_TLS:
        raise Forbidden(
            "database_unprotected",
            f"The database is on another host, and nothing checks that it is the right one (sslmode {mode or 'is not given'}).",
            "Add `sslmode=verify-full` to the URL, and `sslrootcert=` with the authority's certificate.",
        )


def password(settings: Settings) -> str | None:
    """The password of the database; None where libpq is to find one by itself (PGPASSWORD, PGPASSFILE), or none is needed.

    Raises `Forbidden("config_insecure")`, `Unprocessable("database_password_unusable")`.
    """
    path = settings.database_password_file
    if path is None:
        return os.environ.get(PASSWORD)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise unusable(path, str(error.strerror)) from error
    with os.fdopen(fd, "rb") as file:
        check_file(fd, path, private=True)
        return parse(file.read(MAX_PASSWORD + 1), path)


def of_environment(descriptor: int | None) -> str | None:
    """The password of the environment, where this process was started with one and has it no more (`wire.handed`)."""
    if descriptor is None:
        return None
    found = (handed.value(descriptor, name) for name in VARIABLES)
    return next((os.fsdecode(one) for one in found if one is not None), None)


def parse(content: bytes, path: Path) -> str:
    """The password that a file has. Raises `Unprocessable("database_password_unusable")`."""
    try:
        found = content.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise unusable(path, "it is not UTF-8") from None
    if not found or len(content) > MAX_PASSWORD or "\n" in found or "\0" in found:
        raise unusable(path, "it is not one line")
    return found


def _parts(text: str) -> tuple[SplitResult, dict[str, list[str]]]:
    try:
        url = urlsplit(text)
        query = parse_qs(url.query, keep_blank_values=True, strict_parsing=bool(url.query))
        named = url.password is not None or "password" in query
        known = url.scheme in ("postgresql", "postgres") and bool(url.path.strip("/")) and (url.port or 1) > 0
    except ValueError:
        named, known = False, False
    if named:
        raise Unprocessable(
            "database_url_invalid",
            "The URL of the database has a password in it, where others may read it.",
            f"Leave it out; name a file with `database_password_file`, or set {PASSWORD}.",
        )
    if not known:
        raise Unprocessable(
            "database_url_invalid",
            "The URL of the database is none of PostgreSQL's.",
            "It looks like postgresql://user@host:5432/database?sslmode=verify-full.",
        )
    return url, query


def _is_local(host: str | None, query: dict[str, list[str]]) -> bool:
    hosts = [one for value in query.get("host", [host or ""]) for one in value.split(",")]
    return all(one in ("", "localhost") or one.startswith("/") or _is_loopback(one) for one in hosts)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def unusable(path: Path, why: str) -> Unprocessable:
    """The error of a file that holds no password."""
    return Unprocessable(
        "database_password_unusable",
        f"{path} holds no password of the database: {why}.",
        "Write the password into it, one line, and `chmod 600` it.",
    )
