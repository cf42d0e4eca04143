"""Work on a data folder without its service, done as the user that the files belong to."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hatchway.domain.errors import Conflict, HatchwayError, Internal, from_status
from hatchway.supervisor import database, folder, uids
from hatchway.supervisor.settings import Settings
from hatchway.supervisor.view import open_to_role

if TYPE_CHECKING:
    from hatchway.control.config import ControlConfig


def create_key(
    settings: Settings, name: str, scopes: list[str], expires_in_s: float | None, *, e2b: bool = False
) -> dict[str, Any]:
    """Makes an API key; the answer has its secret, this once. Raises `Conflict("service_is_up")` and what the check of its fields does."""
    from hatchway.control import offline

    made: dict[str, Any] = as_control(
        settings, lambda config: offline.create_key(config, name, scopes, expires_in_s, e2b=e2b)
    )
    return made


def list_keys(settings: Settings) -> list[dict[str, Any]]:
    """The API keys, without their secrets."""
    from hatchway.control import offline

    found: list[dict[str, Any]] = as_control(settings, offline.list_keys)
    return found


def revoke_key(settings: Settings, key_id: str) -> None:
    """Ends an API key. Raises `NotFound("unknown_key")`."""
    from hatchway.control import offline

    as_control(settings, lambda config: offline.revoke_key(config, key_id))


def revoke_development_keys(settings: Settings) -> list[str]:
    """Ends every key that was made for development and removes its files; returns the keys' ids."""
    from hatchway.control import offline

    revoked: list[str] = as_control(settings, offline.revoke_development_keys)
    settings.development_key.unlink(missing_ok=True)
    return revoked


def as_control(
    settings: Settings,
    body: Callable[["ControlConfig"], Any],
    *,
    before: Callable[[Settings], None] = lambda prepared: None,
) -> Any:
    """Runs `body` with the control plane's configuration in a child that has control's user, and returns or raises what it does.

    `before` is called in this process once the folder is locked. Raises `Conflict("service_is_up")`.
    """
    lock = folder.Lock(settings)
    if lock.holder() is not None:
        raise Conflict(
            "service_is_up",
            "The service is up: its database is its own.",
            "Leave out --offline, or `hatchway down` first.",
        )
    claim = uids.claim(settings)
    try:
        if claim is not None:
            settings = replace(settings, uid_base=claim.base)
        folder.prepare(settings)
        lock.take()
        try:
            before(settings)
            return in_child(settings, body)
        finally:
            lock.release()
    finally:
        if claim is not None:
            claim.release()


def in_child(settings: Settings, body: Callable[["ControlConfig"], Any]) -> Any:
    """Like `as_control`, whether the service is up or not."""
    from hatchway.control.config import ControlConfig

    config = ControlConfig(
        folder=settings.control,
        database_url=settings.database_url,
        database_password=database.password(settings),
    )
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            _become(settings)
            _answer(writing, body, config)
        finally:
            os._exit(1)  # whatever went wrong: the parent hears no answer
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        told = stream.read()
    os.waitpid(pid, 0)
    if not told:
        raise Internal("internal", "The process that was to change the database died.", "Look at what it wrote above.")
    answer = msgspec.json.decode(told)
    if "error" in answer:
        raise from_status(answer["status"], **answer["error"])
    return answer["result"]


def _become(settings: Settings) -> None:
    uid = settings.identity.control
    if os.geteuid() == 0 and uid != 0:
        open_to_role((Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2], settings.control))
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def _answer(fd: int, body: Callable[["ControlConfig"], Any], config: "ControlConfig") -> None:
    try:
        answer: dict[str, Any] = {"result": body(config)}
    except HatchwayError as error:
        answer = {"status": error.status, "error": error.as_dict()}
    with os.fdopen(fd, "wb") as stream:
        stream.write(msgspec.json.encode(answer))
