"""Credentials as flows: which request, and what the answer means. No I/O."""

from collections.abc import Mapping, Sequence

from .calls import Listing, compact, either, exchange, segment
from .models import Credential, MasterKey
from .steps import Flow, Request


def credentials() -> Listing[Credential]:
    """The credentials of the project."""
    return Listing("/v1/credentials", "credentials", Credential)


def get_credential(name: str, *, check: bool) -> Flow[Credential]:
    """Asks for one credential."""
    query = "?check=true" if check else ""
    reply = yield from exchange(Request("GET", f"/v1/credentials/{segment(name)}{query}"))
    return either(reply.body, "credential", Credential)


def put_credential(name: str, body: Mapping[str, object]) -> Flow[Credential]:
    """Makes or changes one."""
    reply = yield from exchange(Request("PUT", f"/v1/credentials/{segment(name)}", json=body))
    return either(reply.body, "credential", Credential)


def delete_credential(name: str) -> Flow[None]:
    """Forgets one."""
    yield from exchange(Request("DELETE", f"/v1/credentials/{segment(name)}"))


def rotate_master_key() -> Flow[MasterKey]:
    """Has everything sealed with a new key. Not repeated: each time there is another one."""
    reply = yield from exchange(Request("POST", "/v1/master-key/rotate", repeatable=False))
    return either(reply.body, "master_key", MasterKey)


def credential_body(
    hosts: Sequence[str],
    value: str | None,
    variable: str | None,
    file: str | None,
    vault: Mapping[str, str] | None,
) -> dict[str, object]:
    """Builds the body of a put. Raises `ValueError` where not exactly one source is given."""
    kinds = {"store": value, "env": variable, "file": file, "vault": vault}
    given = [kind for kind, one in kinds.items() if one is not None]
    if len(given) != 1:
        raise ValueError("a credential has exactly one of value, variable, file and vault")
    source = {"kind": given[0], **compact(value=value, variable=variable, file=file), **(vault or {})}
    return {"source": source, "hosts": list(hosts)}
