"""`/files`: who may read or write, which path, for whom; and how its errors are said."""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl

from hatchway.client import errors as ours
from hatchway.client.afiles import AsyncFiles
from hatchway.e2b import signatures
from hatchway.e2b.envd import paths, users
from hatchway.e2b.envd.connect import ConnectError
from hatchway.e2b.envd.requests import Request
from hatchway.e2b.errors import E2bError
from hatchway.e2b.identity import same

ACCESS_TOKEN = "x-access-token"
MAX_QUERY = 32 * 1024


@dataclass(frozen=True, slots=True)
class Access:
    """A request that may do what it asks."""

    path: str | None
    """As the guest takes it; None: the query names none."""
    named: str
    """As the query has it."""
    user: str | None
    files: AsyncFiles


async def let_in(request: Request, operation: str, token: str | None) -> Access:
    """Checks the right to an operation, by the token (None: it takes none) or by a signature. Raises `E2bError`."""
    query = query_of(request)
    path, user = query.get("path", ""), query.get("username", "")
    signed = token is not None and _check(request.headers, query, path, user, operation, token)
    handle = await request.sandbox()
    try:
        # Who has a link alone does what it says: a header is not signed, and would lead a relative path to another home.
        named = user or (None if signed else request.user())
        return Access(paths.local(path) if path else None, path, named, paths.files_of(handle, named))
    except ConnectError as error:
        raise E2bError(401 if error.code == "unauthenticated" else 400, error.message) from None


def query_of(request: Request) -> dict[str, str]:
    """The first of each parameter. Raises `E2bError`."""
    raw = bytes(request.scope["query_string"])
    if len(raw) > MAX_QUERY:
        raise E2bError(400, f"the query has more than {MAX_QUERY} octets")
    try:
        pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=64)
    except ValueError:
        raise E2bError(400, "the query is not UTF-8 in percent encoding") from None
    query: dict[str, str] = {}
    for name, value in pairs:
        query.setdefault(name, value)
    return query


def _check(
    headers: Mapping[str, str], query: Mapping[str, str], path: str, user: str, operation: str, token: str
) -> bool:
    """Whether it is a signature, not the token, that gives the right. Raises `E2bError` 401."""
    given = headers.get(ACCESS_TOKEN)
    if given is not None:
        if not same(given, token):
            raise E2bError(401, "access token present in header but does not match")
        return False
    expiration: int | None = None
    if text := query.get("signature_expiration"):
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise E2bError(401, "invalid signature expiration")
        expiration = int(text)
    refused = signatures.refusal(query.get("signature"), path, operation, user, token, expiration)
    if refused is not None:
        raise E2bError(401, refused)
    return True


def of_files(error: ours.HatchwayError, path: str) -> E2bError:
    """An error of reading or writing a file, in the words that E2B's agent has."""
    if error.code == "file_not_found":
        return E2bError(404, f"path '{path}' does not exist")
    if error.code == "is_a_folder":
        return E2bError(400, f"path '{path}' is a directory")
    if users.is_unknown(error):
        return E2bError(401, f"invalid username: {error.cause}")
    if error.code == "sandbox_disk_full":
        return E2bError(507, f"not enough disk space available: {error.cause}")
    if error.code in (
        "not_a_folder",
        "path_too_long",
        "link_loop",
        "file_operation_invalid",
        "file_too_large",
        "invalid_field",
    ):
        return E2bError(400, error.cause)
    if isinstance(error, ours.Exhausted):
        return E2bError(429, error.cause)
    return E2bError(500, error.cause)
