"""The client for asyncio: `AsyncHatchway`, and the sandboxes and sessions that it hands out.

Every method is one flow, carried out by the async driver; `sync` has the same for blocking code.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from . import calls, policycalls, streams
from .aarchives import AsyncArchives
from .acredentials import AsyncCredentials
from .aoversight import AsyncApprovals, AsyncAudit
from .apolicies import AsyncPolicies
from .arecords import AsyncKeys, AsyncOperations, AsyncPools, AsyncSnapshots, AsyncTemplates, all_of
from .atenancy import AsyncProjects, AsyncTokens
from .atransport import AsyncDriver
from .config import find
from .events import Exit, SessionEvent, StreamName
from .models import (
    Limits,
    Operation,
    Result,
    SandboxInfo,
    SandboxMetrics,
    SandboxToken,
    ServiceEvent,
    SessionInfo,
    Snapshot,
)
from .reach import Reach, Scope, check_port, make_token, port_link, port_url
from .running import DEFAULT_MAX_OUTPUT, Gathering, SessionState, octets

if TYPE_CHECKING:
    from .afiles import AsyncFiles
    from .aterminal import AsyncTerminal
    from .forwarding import AsyncForward, OnError


class AsyncHatchway:
    """A client of one service, for one event loop. Use it as a context manager, or `close()` it.

    `url` and `key` are found by themselves where they are not given: `HATCHWAY_URL` and `HATCHWAY_API_KEY`, else the
    files that `hatchway up` wrote into the data folder. `timeout` is the time in seconds that one answer may take.
    """

    def __init__(
        self, url: str | None = None, key: str | None = None, *, timeout: float = 30.0, ca_file: str | None = None
    ) -> None:
        config = find(url, key, ca=ca_file)
        self.url = config.url
        self._driver = AsyncDriver(config, timeout)
        self.sandboxes = AsyncSandboxes(self._driver)
        self.sessions = AsyncSessions(self._driver)
        self.snapshots = AsyncSnapshots(self._driver)
        self.operations = AsyncOperations(self._driver)
        self.templates = AsyncTemplates(self._driver)
        self.pools = AsyncPools(self._driver)
        self.policies = AsyncPolicies(self._driver)
        self.keys = AsyncKeys(self._driver)
        self.credentials = AsyncCredentials(self._driver)
        self.projects = AsyncProjects(self._driver)
        self.tokens = AsyncTokens(self._driver)
        self.audit = AsyncAudit(self._driver)
        self.approvals = AsyncApprovals(self._driver)
        self.archives = AsyncArchives(self._driver)

    def events(self, after: str | None = None) -> AsyncIterator[ServiceEvent]:
        """Iterates over what changes in the project, for ever; from after the event with id `after`, else from now on."""
        return self._driver.stream(streams.service_events(after, {}))

    async def close(self) -> None:
        """Closes all connections; sandboxes and commands go on."""
        await self._driver.close()

    async def __aenter__(self) -> "AsyncHatchway":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncSandboxes:
    """The sandboxes of the project."""

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver

    async def create(
        self,
        template: str | None = None,
        *,
        snapshot: Snapshot | str | None = None,
        name: str | None = None,
        metadata: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        vcpus: int | None = None,
        memory_mib: int | None = None,
        disk_mib: int | None = None,
        require_isolation: str | None = None,
        timeout_s: float | None = None,
        idle_timeout_s: float | None = None,
        on_timeout: str | None = None,
        auto_wake: bool | None = None,
        snapshots: Mapping[str, object] | None = None,
        pool: str | None = None,
        policy: str | Mapping[str, object] | None = None,
        credentials: Sequence[str] | None = None,
        annotations: Mapping[str, object] | None = None,
        wait: bool = True,
        timeout: float = 120.0,
    ) -> "AsyncSandbox":
        """Makes a sandbox from a template (`seed:latest` unless one is given) or a snapshot and, with `wait`, returns when it runs.

        `memory_mib` and `disk_mib` are in MiB; `require_isolation` is `hardware` or `emulated`. `timeout_s` bounds how long it runs at
        a time, `idle_timeout_s` how long nobody uses it; `on_timeout` is what is done then (`suspend pause stop delete`), and with
        `auto_wake` traffic wakes it again. `pool` is `auto`, `never` or a pool's name.
        `annotations` are for programs to keep with it (at most 64 KiB of JSON), `metadata` for people.
        `policy` is the name of a policy, or a document of its own (text or object), `credentials` which of those it may use. Raises `OperationFailed`
        when it cannot be made (the sandbox is then `failed` and stays for you to look at or delete: `sandbox_id` of the
        error), and `WaitTimeout` after `timeout` seconds.
        """
        kept = snapshot.id if isinstance(snapshot, Snapshot) else snapshot
        body = calls.compact(
            template="seed:latest" if template is None and kept is None else template,
            snapshot=kept,
            name=name,
            metadata=metadata,
            env=env,
            vcpus=vcpus,
            memory_mib=memory_mib,
            disk_mib=disk_mib,
            require_isolation=require_isolation,
            timeout_s=timeout_s,
            idle_timeout_s=idle_timeout_s,
            on_timeout=on_timeout,
            auto_wake=auto_wake,
            snapshots=snapshots,
            pool=pool,
            policy=policycalls.of_sandbox(policy),
            credentials=None if credentials is None else list(credentials),
            annotations=annotations,
        )
        info, operation = await self._driver.run(calls.create_sandbox(body, wait=wait, timeout_s=timeout))
        return AsyncSandbox(self._driver, info, operation)

    async def get(self, sandbox_id: str, *, annotations: bool = False) -> "AsyncSandbox":
        """Returns the sandbox with this id, with its annotations where those are asked for; raises `NotFound`."""
        return AsyncSandbox(
            self._driver, await self._driver.run(calls.get_sandbox(sandbox_id, annotations=annotations))
        )

    def list(
        self,
        *,
        state: str | None = None,
        template: str | None = None,
        metadata: Mapping[str, str] | None = None,
        annotations: bool = False,
    ) -> AsyncIterator[SandboxInfo]:
        """Iterates over the sandboxes with this state, template and metadata, page by page; with their annotations where those are asked for."""
        return all_of(self._driver, calls.sandboxes(state, template, metadata, annotations=annotations))

    async def metrics(self, sandbox_id: str) -> SandboxMetrics:
        """Asks what one of them uses: CPU, memory, disk and processes, as its guest says and as its host counts."""
        return await self._driver.run(calls.sandbox_metrics(sandbox_id))

    async def delete(self, sandbox_id: str, *, wait: bool = True, timeout: float = 60.0) -> Operation:
        """Deletes a sandbox, whatever it is doing; deleting it again succeeds and does nothing."""
        return (await self._driver.run(calls.delete_sandbox(sandbox_id, wait=wait, timeout_s=timeout)))[1]


class AsyncSandbox:
    """One sandbox. As a context manager it is deleted at the end.

    `info` is what the service last told; `refresh()` asks again.
    """

    def __init__(self, driver: AsyncDriver, info: SandboxInfo, operation: Operation | None = None) -> None:
        self._driver = driver
        self.info = info
        self.operation = operation
        self._reach = Reach(info.id)

    @property
    def id(self) -> str:
        """20 characters of `[a-z0-9]`."""
        return self.info.id

    @property
    def state(self) -> str:
        """The state as it was last told."""
        return self.info.state

    async def refresh(self) -> SandboxInfo:
        """Asks the service for the sandbox as it is now."""
        self.info = await self._driver.run(calls.get_sandbox(self.id))
        return self.info

    async def metrics(self) -> SandboxMetrics:
        """Asks what it uses: CPU, memory, disk and processes, as its guest says and as its host counts."""
        return await self._driver.run(calls.sandbox_metrics(self.id))

    async def update(
        self,
        *,
        name: str | UnsetType | None = UNSET,
        metadata: Mapping[str, str] | UnsetType = UNSET,
        timeout_s: float | UnsetType | None = UNSET,
        idle_timeout_s: float | UnsetType | None = UNSET,
        on_timeout: str | UnsetType = UNSET,
        auto_wake: bool | UnsetType = UNSET,
        snapshots: Mapping[str, object] | UnsetType | None = UNSET,
        policy: str | Mapping[str, object] | UnsetType | None = UNSET,
        credentials: Sequence[str] | UnsetType | None = UNSET,
        annotations: Mapping[str, object] | UnsetType = UNSET,
        shorten: bool | UnsetType = UNSET,
    ) -> SandboxInfo:
        """Changes the name (None takes it away), replaces the metadata, or changes its lifetime or its policy; what is not given stays as it is.

        Of `annotations` each entry replaces the one of its name, and None takes it away.
        `timeout_s` counts from now; a deadline that would come earlier by it raises `Conflict` (`would_shorten`) without `shorten`.
        """
        body = calls.given(
            name=name,
            metadata=metadata,
            timeout_s=timeout_s,
            idle_timeout_s=idle_timeout_s,
            on_timeout=on_timeout,
            auto_wake=auto_wake,
            snapshots=snapshots,
            policy=policycalls.of_sandbox(policy),
            credentials=credentials,
            annotations=annotations,
            shorten=shorten,
        )
        self.info = await self._driver.run(calls.update_sandbox(self.id, body))
        return self.info

    async def extend(self, seconds: float) -> SandboxInfo:
        """Lets it run for at least so many seconds from now; never shortens its deadline, and gives none to one that has none."""
        self.info = await self._driver.run(calls.extend_sandbox(self.id, seconds))
        return self.info

    async def pause(self, *, wait: bool = True, timeout: float = 60.0) -> Operation:
        """Stops the vCPUs; memory stays resident."""
        return await self._change("pause", wait, timeout)

    async def resume(self, *, wait: bool = True, timeout: float = 60.0) -> Operation:
        """Lets the vCPUs of a paused sandbox go on."""
        return await self._change("resume", wait, timeout)

    async def suspend(self, *, wait: bool = True, timeout: float = 120.0) -> Operation:
        """Keeps memory and disk and releases the machine."""
        return await self._change("suspend", wait, timeout)

    async def restore(self, *, wait: bool = True, timeout: float = 120.0) -> Operation:
        """Lets a suspended sandbox go on where it stood."""
        return await self._change("restore", wait, timeout)

    async def fork(
        self,
        count: int = 1,
        *,
        name: str | None = None,
        metadata: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        annotations: Mapping[str, object] | None = None,
        timeout: float = 300.0,
    ) -> "list[AsyncSandbox]":
        """Branches `count` new sandboxes off (1 to 100), which go on from where this one stands; returns those that run.

        This one runs on. What is not given is as here. `operation.result` tells what became of each branch. Raises
        `OperationFailed` when none could be made.
        """
        body = calls.compact(count=count, name=name, metadata=metadata, env=env, annotations=annotations)
        self.operation = await self._change("fork", True, timeout, body)
        made = calls.branch_ids(self.operation)
        return [AsyncSandbox(self._driver, await self._driver.run(calls.get_sandbox(one))) for one in made]

    async def snapshot(self, kind: str = "full", *, name: str | None = None, timeout: float = 300.0) -> Snapshot:
        """Keeps it as it is: `disk`, or `full` with memory, from which it can go on."""
        operation = await self._change("snapshots", True, timeout, calls.compact(kind=kind, name=name))
        return await self._driver.run(calls.snapshot_of(operation))

    def snapshots(self, *, kind: str | None = None) -> AsyncIterator[Snapshot]:
        """Iterates over its snapshots, newest first."""
        return all_of(self._driver, calls.snapshots(self.id, kind))

    async def rollback(self, snapshot: Snapshot | str, *, timeout: float = 300.0) -> Operation:
        """Goes back to one of its own snapshots: from a `full` one it runs on, from a `disk` one it is stopped."""
        wanted = snapshot if isinstance(snapshot, str) else snapshot.id
        return await self._change("rollback", True, timeout, {"snapshot": wanted})

    async def stop(self, *, wait: bool = True, timeout: float = 60.0) -> Operation:
        """Powers off: memory is lost, the disk is kept."""
        return await self._change("stop", wait, timeout)

    async def start_vm(self, *, wait: bool = True, timeout: float = 120.0) -> Operation:
        """Boots a stopped or failed sandbox on its kept disk. (Commands: `run` and `start`.)"""
        return await self._change("start", wait, timeout)

    async def wake(self, *, wait: bool = True, timeout: float = 120.0) -> Operation:
        """Makes it run, by whichever of resume, restore and start applies."""
        return await self._change("wake", wait, timeout)

    async def delete(self, *, wait: bool = True, timeout: float = 60.0) -> Operation:
        """Deletes it, whatever it is doing; doing so again succeeds and does nothing."""
        self.info, operation = await self._driver.run(calls.delete_sandbox(self.id, wait=wait, timeout_s=timeout))
        return operation

    async def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes | str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout: float | None = None,
        max_output: int = DEFAULT_MAX_OUTPUT,
        limits: Limits | None = None,
    ) -> Result:
        """Runs a command to its end and returns what it wrote. A string is run by a shell, a list as it is.

        The command is killed after `timeout` seconds (`reason` is then `timeout`); `limits` bound what it may use. Raises `OutputLimit` when it writes
        more than `max_output` octets to one stream. That it failed is not an error: see `Result.exit_code` and
        `Result.check()`.
        """
        session = await self.start(
            command, stdin=stdin is not None, env=env, cwd=cwd, user=user, timeout=timeout, limits=limits
        )
        gathering = Gathering(max_output)
        try:
            if stdin is not None and session.exit is None:
                await self._driver.run(session._state.feed(octets(stdin)))
            async for event in session:
                gathering.take(event, session.id)
        except BaseException:
            await session.kill()
            raise
        return gathering.result(session.id, await session.wait())

    async def start(
        self,
        command: str | Sequence[str],
        *,
        stdin: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        pty: tuple[int, int] | None = None,
        timeout: float | None = None,
        retain: float | None = None,
        limits: Limits | None = None,
        timeout_scope: str | None = None,
        linger: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> "AsyncSession":
        """Starts a command and returns its session, to iterate over while it runs.

        `pty` gives it a terminal of so many rows and columns, `limits` bound what it may use. The output is kept for `retain` seconds after the end.
        `timeout` kills its whole tree, with `timeout_scope="leader"` the process alone. Streams that others hold when it has ended are waited
        for `linger` seconds (2 by default). `metadata` is kept with the session.
        """
        body = calls.session_body(
            command,
            env=env,
            cwd=cwd,
            user=user,
            stdin=stdin,
            pty=pty,
            timeout_s=timeout,
            retain_s=retain,
            limits=limits,
            timeout_scope=timeout_scope,
            linger_s=linger,
            metadata=metadata,
        )
        opened = await self._driver.run(calls.create_session(self.id, body))
        session = AsyncSession(self._driver, opened)
        await session.attach()
        return session

    def sessions(
        self,
        *,
        state: str | None = None,
        pid: int | None = None,
        metadata: Mapping[str, str] | None = None,
        live: bool = False,
        env: bool = False,
    ) -> AsyncIterator[SessionInfo]:
        """Iterates over the command sessions of the sandbox, as far as they are kept and pass the filters, newest first.

        `state` may be several with commas between them. With `live` they are told as the sandbox's node knows them now, with `env`
        their environment too.
        """
        return all_of(self._driver, calls.sessions_of(self.id, state, pid, metadata, live=live, env=env))

    def session(self, info: SessionInfo, *, live: bool = False) -> "AsyncSession":
        """A session that `sessions` has told of, as `client.sessions.get` gives it."""
        return _session_of(self._driver, info, live)

    @property
    def files(self) -> "AsyncFiles":
        """The files of the sandbox."""
        from .afiles import AsyncFiles

        return AsyncFiles(self._driver, self._reach)

    async def terminal(
        self,
        command: str | Sequence[str] | None = None,
        *,
        rows: int = 24,
        cols: int = 80,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout: float | None = None,
        retain: float | None = None,
        limits: Limits | None = None,
    ) -> "AsyncTerminal":
        """Makes a command with a terminal, by default a login shell, to iterate over and to type into.

        It starts when its terminal is connected to: by iterating, sending or `connect()`.
        """
        from .aterminal import AsyncTerminal
        from .wires import SHELL, terminal_env

        body = calls.session_body(
            SHELL if command is None else command,
            env=terminal_env(env),
            cwd=cwd,
            user=user,
            stdin=True,
            pty=(rows, cols),
            timeout_s=timeout,
            retain_s=retain,
            limits=limits,
        )
        return AsyncTerminal(self._driver, await self._driver.run(calls.create_session(self.id, body)))

    async def token(self, scopes: Sequence[Scope], *, ttl: float = 3600.0) -> SandboxToken:
        """Makes a token of this sandbox for a browser or a program that shall reach nothing else.

        `scopes` are of `files`, `ports` and `sessions`; it is good for `ttl` seconds, at most a day.
        """
        return await self._driver.run(make_token(self.id, [*scopes], ttl))

    async def port_url(self, port: int) -> str:
        """Returns the URL of a port. Requests to it carry the header `Hatchway-Token` with a token for `ports`; see `token`."""
        return port_url(await self._driver.run(self._reach.ready("ports")), port)

    async def port_link(self, port: int, *, path: str = "/", ttl: float = 3600.0) -> str:
        """Returns a link for a browser: it sets a cookie that is good for `ttl` seconds and leads to `path` of the port.

        Whoever has the link has the right to the ports of the sandbox, for so long.
        """
        check_port(port)
        return port_link(await self.token(["ports"], ttl=ttl), port, path)

    async def forward(
        self, local: int, remote: int, *, host: str = "127.0.0.1", on_error: "OnError | None" = None
    ) -> "AsyncForward":
        """Listens on the port `local` of this machine (0: any, see `port`) and leads its connections to the port `remote` in the sandbox.

        Ends of both directions are kept apart, and connections that break are reset. `on_error` is told of those that could not
        be made, for example with the code `port_closed`. Close it, or use it as a context manager.
        """
        from .forwarding import AsyncForward

        forward = AsyncForward(self._driver, self._reach, remote, local, host, on_error)
        await forward.open()
        return forward

    async def _change(
        self, verb: str, wait: bool, timeout: float, body: Mapping[str, object] | None = None
    ) -> Operation:
        self.info, operation = await self._driver.run(
            calls.change_sandbox(self.id, verb, wait=wait, timeout_s=timeout, body=body)
        )
        return operation

    async def __aenter__(self) -> "AsyncSandbox":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.delete()

    def __repr__(self) -> str:
        return f"<AsyncSandbox {self.id} {self.state}>"


class AsyncSession:
    """One command in a sandbox.

    Iterating gives its events until the end, each octet once, whatever becomes of connections meanwhile; leaving a loop
    and iterating again goes on where it was. The command itself runs on without any reader.
    """

    def __init__(self, driver: AsyncDriver, opened: calls.Opened, *, fresh: bool = True) -> None:
        self._driver = driver
        self._state = SessionState(opened, fresh=fresh)
        self._events: AsyncGenerator[SessionEvent, None] | None = None
        self._first: SessionEvent | None = None

    @property
    def id(self) -> str:
        """20 characters of `[a-z0-9]`."""
        return self._state.info.id

    @property
    def info(self) -> SessionInfo:
        """What the service last told; `refresh()` asks again."""
        return self._state.info

    @property
    def exit(self) -> Exit | None:
        """How the process ended, as soon as the iteration has come there."""
        return self._state.cursor.exit

    async def refresh(self) -> SessionInfo:
        """Asks the service for the session as it is now."""
        self._state.info = await self._driver.run(calls.get_session(self.id))
        return self._state.info

    async def attach(self) -> None:
        """Opens the stream and stays until the process was started, or could not be. Iterating does it by itself."""
        if self._events is None and self._first is None and not self._state.cursor.ended:
            self._first = await self._next()

    def __aiter__(self) -> AsyncIterator[SessionEvent]:
        return self

    async def __anext__(self) -> SessionEvent:
        event, self._first = self._first, None
        if event is None:
            event = await self._next()
        if event is None:
            raise StopAsyncIteration
        return event

    async def _next(self) -> SessionEvent | None:
        if self._events is None:
            self._events = self._driver.stream(self._state.attach())
        try:
            return await anext(self._events, None)
        except BaseException:
            # Whoever iterates again attaches again, behind what was delivered.
            self._events = None
            raise

    async def wait(self) -> Exit:
        """Reads on to the end and returns how the process ended. What it wrote can still be had from `output()`."""
        async for _event in self:
            pass
        return self._state.ended()

    def output(self, stream: StreamName = "stdout", from_: int = 0, *, follow: bool = True) -> AsyncIterator[bytes]:
        """Iterates over the raw octets of one stream from `from_` on, until its end, or with `follow=False` what is there.

        Raises `Gone` where octets were lost.
        """
        return self._driver.stream(streams.output(self._state.line, stream, from_, follow))

    async def write_stdin(self, data: bytes | str, *, eof: bool = False) -> None:
        """Writes to the standard input, and closes it after that with `eof`. Returns when all of it was taken.

        One writer at a time. Raises `Conflict("process_ended")` when nobody reads any more.
        """
        await self._driver.run(self._state.input.write(octets(data), eof=eof))

    async def close_stdin(self) -> None:
        """Closes the standard input: the process reads the end of file."""
        await self.write_stdin(b"", eof=True)

    async def append_stdin(self, data: bytes | str, *, eof: bool = False) -> None:
        """Writes to the standard input behind what others write: any number of writers. Returns when all of it was taken.

        A connection that breaks raises `ConnectionFailed`; how much was taken is then not known.
        """
        await self._driver.run(streams.append(self._state.line, octets(data), eof=eof))

    async def send_signal(self, signal: str | int = "TERM", *, scope: str = "tree") -> bool:
        """Sends a signal, by name (`TERM`) or number, to the whole process tree or with `scope="leader"` to the leader.

        Tells whether there was a process to take it.
        """
        return await self._driver.run(streams.send_signal(self._state.line, signal, scope))

    async def kill(self) -> None:
        """Kills the whole process tree, if it still runs; never fails."""
        await self._driver.run(self._state.kill())

    async def resize(self, rows: int, cols: int) -> None:
        """Tells the terminal of the command its new size."""
        await self._driver.run(streams.resize(self._state.line, rows, cols))

    def terminal(self) -> "AsyncTerminal":
        """Another view of a command that has a terminal, from the beginning of what is kept of its output."""
        from .aterminal import AsyncTerminal

        return AsyncTerminal(self._driver, calls.Opened(self._state.info, self._state.line.access))

    async def delete(self) -> None:
        """Kills the command if it runs and drops what was kept of it."""
        await self.close()
        await self._driver.run(calls.delete_session(self.id))

    async def close(self) -> None:
        """Stops reading; the command goes on, and so does a later iteration."""
        if self._events is not None:
            await self._events.aclose()
            self._events = None

    async def __aenter__(self) -> "AsyncSession":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncSessions:
    """Command sessions by their id."""

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver

    async def get(self, session_id: str, *, live: bool = False) -> AsyncSession:
        """Returns the session with this id, to read it from its beginning, or with `live` what comes from now on; raises `NotFound`.

        Iterating starts its process, if nobody has done so before.
        """
        return _session_of(self._driver, await self._driver.run(calls.get_session(session_id)), live)


def _session_of(driver: AsyncDriver, info: SessionInfo, live: bool) -> AsyncSession:
    session = AsyncSession(driver, calls.Opened(info, None), fresh=False)
    if live:
        session._state.cursor.begin(info.stdout_bytes, info.stderr_bytes)
    return session
