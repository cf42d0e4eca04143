"""Starts the roles in order, restarts what dies, ends them in order."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import msgspec

from hatchway.domain.errors import HatchwayError, Unavailable
from hatchway.supervisor import database, folder, gateways, logs, profile, secrets, service_manager, uids, wrapper
from hatchway.supervisor.roles import Role, preload, python_argv
from hatchway.supervisor.secrets import Secrets
from hatchway.supervisor.settings import Settings, Tls, libexec
from hatchway.wire import audit, behalf, broker, supervision
from hatchway.wire.node import Empty
from hatchway.wire.rpc import call_once
from hatchway.wire.small_files import copy_file, replace_file
from hatchway.wire.supervision import Supervision

RESTART_PAUSE_S = 1.0
"""A role that died within ten seconds of its start, again, is started again after this, doubled each time up to 30 s."""
DRAIN_WITHIN_S = 60.0
END_WITHIN_S = 10.0
LISTEN_EVERY_S = 5.0
"""How often it is looked whether the roles are alive."""
ASKED_EVERY_S = 0.5
"""How often it is looked, while a template is built, whether we are asked to end."""
LOGS_EVERY_S = 60.0
"""How often the length of the log files is looked at."""

Report = Callable[[dict[str, object]], None]
_HANDLED = (signal.SIGCHLD, signal.SIGIO, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Supervisor:
    """One running service; `report` gets `{event: progress|ready|hung|restarted|down, …}`."""

    def __init__(self, settings: Settings, report: Report) -> None:
        self._settings = settings
        self._tell = report
        self._roles: list[Role] = []
        self._lock = folder.Lock(settings)
        self._claim: uids.Claim | None = None
        self._secrets = Secrets()
        self._began = time.time()
        self._restarted: Counter[str] = Counter()
        self._hung: Counter[str] = Counter()
        self._listened_at = time.monotonic()

    def _report(self, event: dict[str, object]) -> None:
        """Nobody who reads any more, or a full disk below the log, ends no service."""
        with contextlib.suppress(OSError):
            self._tell(event)

    def run(self) -> None:
        """Runs until a signal ends it: SIGINT and SIGTERM power the sandboxes off too, SIGUSR1 leaves them running."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        profile.check_listeners(self._settings)
        database.check(self._settings)
        self._take_secrets()
        self._take_folder()
        profile.check_folder(self._settings)
        _require_vmm()
        api = folder.listen_tcp(self._settings.api_host, self._settings.api_port)
        data = folder.listen_tcp(self._settings.data_host, self._settings.data_port)
        e2b = folder.listen_tcp(self._settings.e2b_host, self._settings.e2b_port) if self._settings.e2b else None
        try:
            self._prepare_images()
            self._probe_kvm()
            self._start_all(api, data, e2b)
            ended_by = self._supervise()
            service_manager.stopping()  # from here on nobody says that we turn
            if ended_by is not signal.SIGUSR1:
                self._drain()
        finally:
            self._end_all()
            self._clean()
        self._report({"event": "down"})

    def drain_only(self) -> None:
        """For what a killed service left behind: brings launcher and node up, powers every sandbox off, ends."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        self._take_folder()
        data = folder.listen_tcp("127.0.0.1", 0)
        try:
            launcher, node = self._launcher_role(), self._node_role(data)
            self._bring_up(launcher)
            preload()
            self._bring_up(node)
            self._drain()
        finally:
            self._end_all()
            self._clean()

    # -- start

    def _take_folder(self) -> None:
        """Makes the data folder ours: its user ids, its rooms, its lock."""
        if self._lock.holder() is not None:
            self._lock.take()  # says who has it
        self._claim = uids.claim(self._settings)
        if self._claim is not None:
            self._settings = replace(self._settings, uid_base=self._claim.base)
        folder.prepare(self._settings)
        self._lock.take()

    def _take_secrets(self) -> None:
        """Takes in certificates, keys and secrets, as the user who may read them; a role that is started gets its own. Raises what `secrets.take` does."""
        former, self._secrets = self._secrets, secrets.take(self._settings)
        former.close()

    def _prepare_images(self) -> None:
        """Builds `seed:latest` where it is not there; in a process of its own, as root, with its progress passed on."""
        tag = self._settings.images / "tags" / "seed" / "latest"
        command = [
            sys.executable,
            "-m",
            "hatchway.node.images.build",
            "--folder",
            str(self._settings.images),
            "--progress",
            "json",
        ]
        command += ["--agent", str(libexec("hatchway-agent"))]
        if not tag.exists():
            self._report(
                {
                    "event": "progress",
                    "phase": "template",
                    "message": "building template seed:latest (downloads about 100 MB)",
                }
            )
        build = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: signal.pthread_sigmask(
                signal.SIG_UNBLOCK, _HANDLED
            ),  # else nothing but a kill would end it
        )
        assert build.stdout is not None
        assert build.stderr is not None
        try:
            for line in self._lines(build.stdout):
                with contextlib.suppress(ValueError):
                    self._report({"event": "progress", **json.loads(line)})
            problem = build.stderr.read().decode(errors="replace")
            if build.wait() != 0:
                raise Unavailable(
                    "template_build_failed",
                    problem.strip()[-2_000:] or "The build ended with an error.",
                    "Mend the cause, then `hatchway up` again.",
                )
        finally:
            if build.poll() is None:
                os.killpg(build.pid, signal.SIGTERM)
                build.wait()

    def _lines(self, stream: IO[bytes]) -> Iterator[bytes]:
        """Lines as they come, until the end. Raises `KeyboardInterrupt` once we are asked to end, also while nothing comes."""
        left = b""
        while True:
            while not select.select([stream], [], [], ASKED_EVERY_S)[0]:
                if self._asked_to_end():
                    raise KeyboardInterrupt
            came = os.read(stream.fileno(), 65_536)
            *lines, left = (left + came).split(b"\n")
            yield from lines
            if not came:
                return
            if self._asked_to_end():
                raise KeyboardInterrupt

    @staticmethod
    def _asked_to_end() -> bool:
        return bool(signal.sigpending() & {signal.SIGINT, signal.SIGTERM})

    def _probe_kvm(self) -> None:
        """Takes the verdict on KVM, for this boot of the host, as the user who may open /dev/kvm; the node goes by it."""
        from hatchway.node.images.store import Images

        images = Images(self._settings.images)
        kernel = images.resolve("seed:latest").part("kernel")
        policy = msgspec.json.encode(self._settings.vmm).decode()
        command = [sys.executable, "-m", "hatchway.node.vmm.verdicts", str(self._settings.run), str(kernel), policy]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode != 0:
            self._report(
                {"event": "progress", "phase": "kvm", "message": f"no verdict, emulated: {done.stderr.strip()[-500:]}"}
            )
        profile.check_vmm(self._settings, kernel)
        profile.check_isolation(self._settings, kernel)
        profile.note(self._settings)

    def _start_all(self, api: socket.socket, data: socket.socket, e2b: socket.socket | None) -> None:
        self._bring_up(self._launcher_role())
        preload()
        # In the order in which one needs another; each waits for what it needs, so that they come up side by side.
        roles = [*gateways.roles(self._settings), self._node_role(data), self._control_role(api)]
        if e2b is not None:
            wrapper.publish_trusted(self._settings)
            roles.append(wrapper.role(self._settings, e2b, lambda: self._secrets))
        self._roles += roles
        for role in roles:
            role.sleep() if role.on_demand else role.start()
        for role in roles:
            if not role.asleep:
                role.wait_ready()
        self._publish_endpoint(api, data, e2b)

    def _bring_up(self, role: Role) -> None:
        self._roles.append(role)
        role.last_start = time.monotonic()
        role.start()
        role.wait_ready()

    def _launcher_role(self) -> Role:
        ids, run = self._settings.identity, self._settings.run
        sock = folder.listen_unix(run / "launcher.sock", socket.SOCK_SEQPACKET, ids.node)
        arguments = [
            "--run-dir", str(run), "--shim", str(libexec("hatchway-shim")), "--listen-fd", str(sock.fileno()),
            "--peer-uid", str(ids.node), "--uid-base", str(ids.vm_base),
            "--memory-mib", str(self._settings.limits.for_sandboxes(_memory_mib())),
        ]  # fmt: skip
        return Role(
            "launcher",
            os.geteuid(),
            self._settings.log / "launcher.log",
            argv=python_argv("hatchway.launcher", *arguments),
            sockets=(sock,),
        )

    def _node_role(self, data: socket.socket) -> Role:
        ids, settings = self._settings.identity, self._settings
        sock = folder.listen_unix(settings.run / "node.sock", socket.SOCK_STREAM, ids.control)
        attach_url = settings.data_url or _url(settings.data_host, data, settings.data_tls)
        own_vmm = [] if settings.vmm.firecracker is None else [Path(settings.vmm.firecracker).parent]

        def body(ready: Callable[[], None]) -> None:
            from hatchway.node.main import NodeConfig, run

            config = NodeConfig(
                folder=settings.node,
                images=settings.images,
                run_dir=settings.run,
                ram_library=libexec("hatchway-ram.so"),
                attach_url=attach_url,
                control_uids=frozenset({ids.control, 0}),
                bake_default=settings.bake,
                limits=settings.limits,
                port_domains=settings.port_domains,
                vmm=settings.vmm,
                store=settings.archives.store,
                import_from=settings.archives.import_from,
                metrics=self._secrets.metrics,
                shards=settings.shards,
            )
            tls = self._secrets.data
            run(
                config,
                control=sock,
                data=data,
                ready=ready,
                alive=ready,
                data_tls=None if tls is None else tls.context(),
            )

        return Role(
            "node",
            ids.node,
            settings.log / "node.log",
            body=body,
            sockets=(sock, data),
            descriptors=lambda: self._secrets.descriptors("data"),
            needs=(settings.node, settings.run, settings.images, libexec("hatchway-ram.so").parent, *own_vmm),
            groups=() if ids.rootless else (ids.audit, ids.broker),
        )

    def _control_role(self, api: socket.socket) -> Role:
        ids, settings = self._settings.identity, self._settings
        e2b = wrapper.control_socket(settings) if settings.e2b else None

        def body(ready: Callable[[], None]) -> None:
            from hatchway.control.main import ControlConfig, run

            config = ControlConfig(
                folder=settings.control,
                database_url=settings.database_url,
                database_password=self._secrets.database_password(settings),
                node_socket=settings.run / "node.sock",
                node_uid=ids.node,
                audit_socket=settings.run / audit.SOCKET,
                webhook_url=settings.webhook,
                webhook_secret=self._secrets.webhook_secret(settings),
                trusted_archive_keys=settings.archives.trusted_keys,
                run_dir=settings.run,
                metrics=self._secrets.metrics,
                production=settings.production,
                ballast_mib=settings.limits.ballast_mib,
                broker_socket=settings.run / broker.SOCKET,
                broker_uid=ids.broker,
                e2b_uid=ids.e2b,
            )
            tls = None if self._secrets.api is None else self._secrets.api.context()
            run(config, api=api, ready=ready, alive=ready, tls=tls, e2b=e2b)

        return Role(
            "control",
            ids.control,
            settings.log / "control.log",
            body=body,
            sockets=(api,) if e2b is None else (api, e2b),
            descriptors=self._of_control,
            needs=(settings.control, settings.run),
            groups=() if ids.rootless else (ids.audit, ids.broker),
        )

    def _of_control(self) -> tuple[int, ...]:
        variables = self._settings.database_environment
        return (
            *self._secrets.descriptors("api", "database", "webhook"),
            *(() if variables is None else (variables,)),
        )

    def _publish_endpoint(self, api: socket.socket, data: socket.socket, e2b: socket.socket | None) -> None:
        """Writes where the service is, and the development key, where CLI and SDK of this user find them."""
        settings = self._settings
        if not settings.production:
            copy_file(settings.control / "dev.key", settings.development_key)
        urls = {
            "api": settings.api_url or _url(settings.api_host, api, settings.api_tls),
            "data": settings.data_url or _url(settings.data_host, data, settings.data_tls),
            "pid": os.getpid(),
        }
        if e2b is not None:
            urls["e2b"] = settings.e2b_url or _url(settings.e2b_host, e2b, settings.e2b_tls)
        replace_file(self._settings.endpoint, json.dumps(urls).encode(), mode=0o644, durable=False)
        self._report({"event": "ready", **urls})
        service_manager.ready(f"API {urls['api']}, data plane {urls['data']}")

    # -- while it runs

    def _publish_roles(self) -> None:
        """run/roles.json: the process of each role that runs, for whoever operates the machine."""
        roles = {role.name: role.pid for role in self._roles if role.pid}
        with contextlib.suppress(OSError):  # on a full disk the roles go on without it
            replace_file(self._settings.run / "roles.json", json.dumps(roles).encode(), mode=0o644, durable=False)
            supervision.publish(
                self._settings.run,
                Supervision(started_at=self._began, restarts=dict(self._restarted), hung=dict(self._hung)),
            )

    def _end_hung(self) -> None:
        """A role that lives and does not answer helps nobody: it is killed, and started again like one that died."""
        now = time.monotonic()
        # Whoever was away himself, with everything else on this machine or alone, has nobody to blame.
        away = now - self._listened_at > 3 * LISTEN_EVERY_S
        self._listened_at = now
        for role in self._roles:
            role.listen()
            if away:
                role.heard_at = now
            elif role.hangs():
                self._hung[role.name] += 1
                self._report({"event": "hung", "role": role.name, "pid": role.pid, "silent_s": now - role.heard_at})
                role.ask_to_end(signal.SIGKILL)
                role.heard_at = now

    def _supervise(self) -> signal.Signals:
        delayed: dict[str, float] = {}
        logs_at = time.monotonic()
        self._publish_roles()
        while True:
            service_manager.alive()
            wait = min((at - time.monotonic() for at in delayed.values()), default=LOGS_EVERY_S)
            wait = min(wait, service_manager.interval_s(LISTEN_EVERY_S))
            info = signal.sigtimedwait(_HANDLED, max(0.0, min(wait, LISTEN_EVERY_S)))
            self._end_hung()
            if time.monotonic() >= logs_at:
                logs_at = time.monotonic() + LOGS_EVERY_S
                for log_file in (self._settings.supervisor_log, *(role.log_file for role in self._roles)):
                    logs.keep_bounded(log_file)
            if info is not None and info.si_signo in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                return signal.Signals(info.si_signo)
            if info is not None and info.si_signo == signal.SIGHUP:
                self._reload_secrets()
                for role in self._roles:
                    role.ask_to_end()
            for role in self._reaped():
                lived = time.monotonic() - role.last_start
                role.restarts = role.restarts + 1 if lived < 10.0 else 0
                pause = 0.0 if role.restarts == 0 else min(30.0, RESTART_PAUSE_S * 2 ** (role.restarts - 1))
                delayed[role.name] = time.monotonic() + pause
            for role in self._roles:
                if role.is_called():
                    delayed.setdefault(role.name, 0.0)
                if role.name in delayed and delayed[role.name] <= time.monotonic():
                    del delayed[role.name]
                    first = role.asleep
                    role.last_start = time.monotonic()
                    try:
                        role.start()
                    except OSError as error:  # the host has no process or descriptor left for it now
                        delayed[role.name] = time.monotonic() + RESTART_PAUSE_S
                        self._report({"event": "progress", "phase": "restart", "message": f"{role.name}: {error}"})
                        continue
                    self._restarted[role.name] += not first
                    self._publish_roles()
                    if not first:
                        self._report({"event": "restarted", "role": role.name})

    def _reload_secrets(self) -> None:
        """Certificates and secrets are renewed while the service is up; with files that cannot be used it goes on with those that it has."""
        try:
            self._take_secrets()
            if self._settings.e2b:
                wrapper.publish_trusted(self._settings)
        except HatchwayError as error:
            self._report({"event": "progress", "phase": "reload", "message": str(error)})

    def _reaped(self) -> list[Role]:
        dead: list[Role] = []
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return dead
            if pid == 0:
                return dead
            dead += [role for role in self._roles if role.pid == pid]
            for role in self._roles:
                role.pid = 0 if role.pid == pid else role.pid

    # -- the end

    def _drain(self) -> None:
        self._report({"event": "progress", "phase": "drain", "message": "powering the sandboxes off"})
        try:
            call_once(self._settings.run / "node.sock", "node.drain", Empty(), within=DRAIN_WITHIN_S)
        except (OSError, TimeoutError, HatchwayError) as error:
            self._report(
                {"event": "progress", "phase": "drain", "message": f"not all sandboxes could be powered off: {error}"}
            )

    def _end_all(self) -> None:
        for role in reversed(self._roles):
            role.ask_to_end()
            deadline = time.monotonic() + END_WITHIN_S
            while role.pid and time.monotonic() < deadline:
                self._reaped()
                if role.pid:
                    signal.sigtimedwait((signal.SIGCHLD,), 0.5)
            if role.pid:
                role.ask_to_end(signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(role.pid, 0)

    def _clean(self) -> None:
        names = (
            "launcher.sock",
            "node.sock",
            "roles.json",
            supervision.NAME,
            behalf.SOCKET,
            wrapper.DATA_CA,
            *gateways.files(self._settings),
        )
        for name in names:
            (self._settings.run / name).unlink(missing_ok=True)
        self._settings.endpoint.unlink(missing_ok=True)
        if self._claim is not None:
            self._claim.release()


def _require_vmm() -> None:
    """Raises `Unavailable("vmm_missing")` before anything is started that could only fail."""
    from hatchway.node.vmm import machines
    from hatchway.node.vmm.host import Host
    from hatchway.node.vmm.seam import VmmError

    try:
        machines.find(machines.machine_of(Host.read().architecture), hardware=False)
    except VmmError as error:
        raise Unavailable(
            "vmm_missing", str(error), "`make setup` installs it; `hatchway doctor` shows what else is missing."
        ) from error


def _memory_mib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20


def _url(host: str, sock: socket.socket, tls: Tls | None) -> str:
    """Where a listener is reached from this machine; from elsewhere only the settings' `url` can say it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    shown = f"[{host}]" if ":" in host else host
    return f"{'http' if tls is None else 'https'}://{shown}:{sock.getsockname()[1]}"
