"""The service's own secrets: keys of TLS, the password of the database, those of the webhook and of E2B's API. This process never has them in memory.

Each file is copied within the kernel into a sealed one (`wire.handed`) as the user who may read it, and checked in a process that ends right
after. A role reads its own when it has been forked. What cannot be used is told before anything is started, or leaves a running service
with what it has.
"""

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from hatchway.domain.errors import HatchwayError, Internal, from_status
from hatchway.supervisor import configuration, database, profile
from hatchway.supervisor.settings import Settings, Tls
from hatchway.wire import handed
from hatchway.wire.metrics import MetricsAccess

T = TypeVar("T")


@dataclass(frozen=True)
class SealedTls:
    """Certificate and key of a listener, as descriptors."""

    files: Tls
    certificate: int
    key: int

    def context(self) -> ssl.SSLContext:
        """What the listener speaks TLS with; in the role whose it is. Raises `Unprocessable("tls_unusable")`."""
        return profile.context_of(self.files, handed.path_of(self.certificate), handed.path_of(self.key))


@dataclass(frozen=True)
class Secrets:
    """See the module. What is not configured is None."""

    api: SealedTls | None = None
    data: SealedTls | None = None
    e2b: SealedTls | None = None
    database: int | None = None
    webhook: int | None = None
    e2b_secret: int | None = None
    metrics: MetricsAccess = field(default_factory=lambda: MetricsAccess(local=False))
    """Who may read the metrics: a hash of the token, no secret."""

    def descriptors(self, *names: str) -> tuple[int, ...]:
        """Those of the named secrets, for the role that reads them."""
        found: list[int] = []
        for name in names:
            one = getattr(self, name)
            found += [one.certificate, one.key] if isinstance(one, SealedTls) else [] if one is None else [one]
        return tuple(found)

    def database_password(self, settings: Settings) -> str | None:
        """The password of the database. Raises `Unprocessable("database_password_unusable")`."""
        if self.database is not None:
            assert settings.database_password_file is not None
            return database.parse(handed.content(self.database), settings.database_password_file)
        return database.of_environment(settings.database_environment)

    def webhook_secret(self, settings: Settings) -> bytes:
        """What requests for approval are told under; empty: nothing. Raises `Unprocessable("secret_unusable")`."""
        return _line(self.webhook, settings.webhook_secret) or b""

    def secret_of_e2b(self, settings: Settings) -> bytes | None:
        """The secret of E2B's API. Raises `Unprocessable("secret_unusable")`."""
        return _line(self.e2b_secret, settings.e2b_secret)

    def close(self) -> None:
        """Lets go of all."""
        for fd in self.descriptors("api", "data", "e2b", "database", "webhook", "e2b_secret"):
            os.close(fd)


def take(settings: Settings) -> Secrets:
    """Takes all of them in. Raises `Forbidden("config_insecure")`, and `Unprocessable` of the kinds that those have who use them."""
    opened: list[int] = []

    def sealed(
        path: Path | None, unusable: Callable[[Path, str], HatchwayError], *, private: bool = True
    ) -> int | None:
        if path is None:
            return None
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                configuration.check_file(fd, path, private=private)
                opened.append(handed.seal(fd))
            finally:
                os.close(fd)
        except OSError as error:
            raise unusable(path, str(error.strerror)) from error
        except ValueError as error:
            raise unusable(path, str(error)) from None
        return opened[-1]

    def tls(files: Tls | None) -> SealedTls | None:
        if files is None:
            return None
        certificate = sealed(files.certificate, profile.unusable, private=False)
        key = sealed(files.key, profile.unusable)
        assert certificate is not None
        assert key is not None
        return SealedTls(files, certificate, key)

    try:
        found = Secrets(
            api=tls(settings.api_tls),
            data=tls(settings.data_tls),
            e2b=tls(settings.e2b_tls),
            database=sealed(settings.database_password_file, database.unusable),
            webhook=sealed(settings.webhook_secret, configuration.unusable),
            e2b_secret=sealed(settings.e2b_secret, configuration.unusable),
        )

        def check() -> MetricsAccess:
            for one in (found.api, found.data, found.e2b):
                if one is not None:
                    one.context()
            found.database_password(settings)
            found.webhook_secret(settings)
            found.secret_of_e2b(settings)
            return profile.load_metrics(settings)

        return replace(found, metrics=_apart(check, MetricsAccess))
    except BaseException:
        for fd in opened:
            os.close(fd)
        raise


def _line(descriptor: int | None, path: Path | None) -> bytes | None:
    if descriptor is None:
        return None
    assert path is not None
    return configuration.parse_secret(handed.content(descriptor), path)


def _apart(body: Callable[[], T], kind: type[T]) -> T:
    """Has `body` done in a process of its own, with which all that it had in memory ends; returns its result, or raises the `HatchwayError` that it raised."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                told: tuple[object, object] = body(), None
            except HatchwayError as error:
                told = None, {"status": error.status, **error.as_dict()}
            with os.fdopen(writing, "wb") as file:
                file.write(msgspec.msgpack.encode(told))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        octets = file.read()
    os.waitpid(pid, 0)
    try:
        result, refused = msgspec.msgpack.decode(octets, type=tuple[kind | None, dict[str, object] | None])  # type: ignore[valid-type]
    except msgspec.DecodeError:
        raise Internal("secrets_unchecked", "The secrets of the service could not be checked.", "Try again.") from None
    if refused is not None:
        status = refused.pop("status")
        code, cause, remedy = (str(refused.pop(name, "")) for name in ("code", "cause", "remedy"))
        raise from_status(status if isinstance(status, int) else 500, code, cause, remedy, **refused)
    assert result is not None
    return result
