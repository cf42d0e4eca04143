"""Where secrets come from: what the control plane put, what the operator lends, and the values as they are now."""

import asyncio
import logging
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence

from hatchway.broker import vault
from hatchway.broker.config import BrokerConfig, Lent, VaultServer
from hatchway.broker.scrubbing import Forms
from hatchway.broker.secret import MAX_OCTETS, Secret, check, without_line_end
from hatchway.broker.store import Store, unknown
from hatchway.broker.vault import Vault
from hatchway.domain.errors import Forbidden, HatchwayError, Unavailable, Unprocessable
from hatchway.domain.policy.names import HostPattern, NameRefused
from hatchway.wire import handed
from hatchway.wire.broker import Source, SourceCheck, VaultPath

REFRESH_S = 60.0
"""How long the value of a variable or a file is believed before it is read again."""
MAX_HOSTS = 64
_FILE = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9_.-]{1,128}")

log = logging.getLogger(__name__)


class Held:
    """A secret that is lent now, with what its responses are searched for."""

    __slots__ = ("_forms", "fresh_until", "hosts", "secret", "version")

    def __init__(self, secret: Secret, version: int, hosts: tuple[HostPattern, ...], fresh_until: float) -> None:
        self.secret = secret
        self.version = version
        self.hosts = hosts
        self.fresh_until = fresh_until
        """Monotonic."""
        self._forms: Forms | None = None

    @property
    def forms(self) -> Forms:
        """What it is looked for as; made when it is first needed."""
        if self._forms is None:
            self._forms = Forms(self.secret.reveal())
        return self._forms

    def may_go_to(self, host: str) -> bool:
        """Whether the source's own list of hosts has this one."""
        return any(pattern.matches(host) for pattern in self.hosts)

    def wipe(self) -> None:
        """Gives it up."""
        self._forms = None
        self.secret.wipe()


class _Fetching:
    """Whose turn it is to fetch a secret, and how many want it."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.wanted = 0


class Sources:
    """All sources of one broker."""

    def __init__(self, config: BrokerConfig, store: Store) -> None:
        """Raises `Unprocessable` for hosts or a Vault that cannot be in a configuration."""
        lent: list[Lent | VaultServer] = [*config.variables.values(), *config.files.values(), *config.vaults.values()]
        for one in lent:
            _patterns(one.hosts)
        self._config = config
        self._store = store
        self._vaults = {name: Vault(name, one) for name, one in config.vaults.items()}
        self._held: dict[tuple[str, str], Held] = {}
        self._fetching: dict[tuple[str, str], _Fetching] = {}
        self._changing = asyncio.Lock()

    async def put(self, source: Source) -> SourceCheck:
        """Keeps a source, from now on in force, and tells whether its secret can be had.

        Raises `Unprocessable` (`credential_value`, `credential_source`, `credential_hosts`, `vault_path`), `Forbidden("not_lent")`, `Conflict("stale_version")`.
        """
        self._check(source)
        async with self._changing:
            await asyncio.to_thread(self._store.put, source)
            self._drop(source.project, source.name)
        return await self.check(source.project, source.name)

    async def delete(self, project: str, name: str) -> list[str]:
        """Forgets a source, or with an empty name all of the project; returns the names of those that were there."""
        names = [name] if name else [one.name for one in self._store.all(project)]
        gone: list[str] = []
        async with self._changing:
            for one in names:
                if await asyncio.to_thread(self._store.delete, project, one):
                    gone.append(one)
                self._drop(project, one)
        return gone

    async def check(self, project: str, name: str) -> SourceCheck:
        """Fetches a secret anew, to tell whether it can be had; raises nothing for one that cannot."""
        version = 0
        try:
            source = self._store.find(project, name)
            version = 0 if source is None else source.version
            held = await self.held(project, name, anew=True)
        except HatchwayError as error:
            return SourceCheck(available=False, error=f"{error.cause} {error.remedy}".strip(), version=version)
        return SourceCheck(available=True, version=held.version)

    async def held(self, project: str, name: str, *, anew: bool = False) -> Held:
        """The secret as it is now. Raises `Unavailable` with what it lacks, or `Forbidden("not_lent")`.

        A value that is still there, and cannot be read again, is not used beyond its time: a revoked secret must not live on here.
        """
        at = project, name
        fetching = self._fetching.setdefault(at, _Fetching())
        fetching.wanted += 1
        try:
            async with fetching.turn:
                return await self._held_now(at, anew=anew)
        finally:  # the last one takes the turn away: whoever waits for it goes by the same as who comes
            fetching.wanted -= 1
            if not fetching.wanted:
                del self._fetching[at]

    async def _held_now(self, at: tuple[str, str], *, anew: bool) -> Held:
        project, name = at
        held = self._held.get(at)
        if held is not None and not anew and time.monotonic() < held.fresh_until:
            return held
        while True:
            source = await asyncio.to_thread(self._store.find, project, name)
            if source is None:
                self._drop(project, name)
                raise unknown(name)
            try:
                secret, fresh_s = await self._fetch(source)
            except BaseException:
                self._drop(project, name)
                raise
            if self._store.find(project, name) is source:
                break
            # It was put anew or deleted while this was fetched, which is its secret no more.
            secret.wipe()
        held = self._held.get(at)  # it may have been given up meanwhile
        if held is not None and held.version == source.version and held.secret.reveal() == secret.reveal():
            secret.wipe()
            held.fresh_until = time.monotonic() + fresh_s
            return held
        self._drop(project, name)
        held = Held(secret, source.version, _patterns(source.hosts), time.monotonic() + fresh_s)
        self._held[at] = held
        return held

    def current(self, project: str, name: str) -> Held | None:
        """What `held` returned, as long as it is fresh: without a wait."""
        held = self._held.get((project, name))
        return held if held is not None and time.monotonic() < held.fresh_until else None

    def keep_only(self, used: set[tuple[str, str]]) -> None:
        """Gives up secrets that nobody may use now."""
        for project, name in [at for at in self._held if at not in used]:
            self._drop(project, name)

    async def rotate(self) -> tuple[str, int]:
        """Seals everything with a new master key; returns its id and how many sources there are. Raises what `Store.rotate` raises."""
        async with self._changing:
            sealed = await asyncio.to_thread(self._store.rotate)
        return self._store.key_id, sealed

    def close(self) -> None:
        """Gives everything up."""
        self.keep_only(set())

    def _drop(self, project: str, name: str) -> None:
        held = self._held.pop((project, name), None)
        if held is not None:
            held.wipe()

    async def _fetch(self, source: Source) -> tuple[Secret, float]:
        if source.vault is not None:
            server = self._lending_vault(source, source.vault)
            value = await self._vaults[source.vault.server].read(source.vault)
            return self._secret(value), server.refresh_s
        if source.variable is not None:
            self._require_lent(source, "variable", source.variable, self._config.variables)
            found = handed.value(self._config.environment, source.variable)
            if found is None:
                raise Unavailable(
                    "secret_missing",
                    f"The variable {source.variable} is not set.",
                    "Set it where the service is started.",
                )
            return self._secret(without_line_end(found)), REFRESH_S
        if source.file is not None:
            self._require_lent(source, "file", source.file, self._config.files)
            return self._secret(await asyncio.to_thread(self._read_file, source.file)), REFRESH_S
        return await asyncio.to_thread(self._store.secret, source.project, source.name), float("inf")

    def _secret(self, value: bytes) -> Secret:
        try:
            return Secret(value)
        except Unprocessable as error:
            raise Unavailable(error.code, error.cause, error.remedy) from None

    def _read_file(self, name: str) -> bytes:
        assert self._config.files_folder is not None
        path = self._config.files_folder / name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(fd, "rb") as file:
                found = os.fstat(fd)
                if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o007:
                    raise Unavailable("unsafe_file", f"{path} can be read by everybody.", f"`chmod 600 {path}`.")
                return without_line_end(file.read(MAX_OCTETS + 3))
        except OSError as error:
            raise Unavailable(
                "secret_missing", f"{path} cannot be read: {error.strerror}.", "See that it is there."
            ) from None

    def _check(self, source: Source) -> None:
        kinds = [one for one in (source.value, source.variable, source.file, source.vault) if one is not None]
        if len(kinds) != 1:
            raise Unprocessable("credential_source", "A credential has exactly one source.", "Give one of its kinds.")
        if not 1 <= len(source.hosts) <= MAX_HOSTS:
            raise Unprocessable(
                "credential_hosts",
                f"A credential has from 1 to {MAX_HOSTS} hosts.",
                "Say which hosts it may be sent to.",
            )
        _patterns(source.hosts)
        if source.value is not None:
            check(source.value)
        elif source.variable is not None:
            self._require_lent(source, "variable", source.variable, self._config.variables)
        elif source.file is not None:
            self._require_lent(source, "file", source.file, self._config.files)
        elif source.vault is not None:
            vault.check_path(source.vault)
            self._lending_vault(source, source.vault)

    def _require_lent(self, source: Source, kind: str, name: str, lent: Mapping[str, Lent]) -> None:
        found = lent.get(name)
        if found is None or not found.is_for(source.project):
            raise _not_lent(kind, name)
        _require_covered(found.hosts, source.hosts)

    def _lending_vault(self, source: Source, path: VaultPath) -> VaultServer:
        server = self._config.vaults.get(path.server)
        if server is None or not server.lends(source.project, path.mount, path.path):
            raise _not_lent("path of Vault", f"{path.server}: {path.mount}/{path.path}")
        _require_covered(server.hosts, source.hosts)
        return server


def _patterns(hosts: Sequence[str]) -> tuple[HostPattern, ...]:
    found: list[HostPattern] = []
    for host in hosts:
        try:
            found.append(HostPattern.parse(host))
        except NameRefused as error:
            raise Unprocessable(
                "credential_hosts", f"{host[:64]!r} is no host for a credential: {error.cause}.", error.remedy
            ) from None
    return tuple(found)


def _require_covered(lent: Sequence[str], wanted: Sequence[str]) -> None:
    """What is lent for some hosts goes to no others, whoever names them."""
    allowed = _patterns(lent)
    for pattern in _patterns(wanted):
        if not any(one.covers(pattern) for one in allowed):
            raise Forbidden(
                "not_lent",
                f"The operator does not lend this secret for {pattern}.",
                "Name hosts that the service's configuration lists for it.",
            )


def _not_lent(kind: str, name: str) -> HatchwayError:
    """Nothing tells whether it is there: a project does not find out what others have."""
    return Forbidden(
        "not_lent",
        f"The operator lends no {kind} {name[:64]!r} to this project.",
        "It has to be listed in the section [broker] of the service's configuration.",
    )
