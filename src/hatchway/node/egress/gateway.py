"""One sandbox's way out: opened before its guest runs, cut where it stands still, closed before it is said to be gone.

Whatever fails here leaves less than the policy allows, never more: a slot has no route but its gateway. So a sandbox that asked for nothing
runs without one and says so (`EgressState.conditions`); one that was given a policy is not made to run without it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hatchway.domain.errors import HatchwayError, Unavailable, Unprocessable
from hatchway.node.egress import bindings, identity
from hatchway.node.egress.bindings import Bound
from hatchway.node.egress.identity import Identity
from hatchway.node.vmm.seam import LaunchRefused, VmmError
from hatchway.wire.egress import (
    CredentialSpec,
    EgressSpec,
    EgressState,
    GatewayOpened,
    GatewayPolicy,
    GatewayRef,
    GatewaySpec,
)
from hatchway.wire.message import Empty

if TYPE_CHECKING:
    from hatchway.node.egress.gateways import Gateways

READY_WITHIN_S = 10.0
"""How long a start with a policy waits for a shard that is just being started again; one without waits for `AT_MOST_S`."""
AT_MOST_S = 2.0
RETRY_S = 0.05
CLOSE_WITHIN_S = 5.0

log = logging.getLogger(__name__)


class Trust(msgspec.Struct, frozen=True):
    """What the guest gets of it: the authority that it has to trust (PEM; empty: none), and the placeholders in its environment."""

    certificate: str = ""
    env: dict[str, str] = msgspec.field(default_factory=dict)


class Gateway:
    """See the module. `wanted`: its machine is there, so that it has to be served."""

    def __init__(self, gateways: "Gateways", sandbox_id: str, project: str, generation: int, folder: Path) -> None:
        self._all = gateways
        self.sandbox_id = sandbox_id
        self.project = project
        self.generation = generation
        self.folder = folder
        self._lock = asyncio.Lock()
        self._identity = Identity()
        self._kept = Identity()
        """What of that is on disk."""
        self._opened: GatewayOpened | None = None
        """What the shard answered that serves it now."""
        self._in_force = 0
        self._bound: tuple[Bound, ...] = ()
        """What its policy says of credentials."""
        self._accepted: tuple[Identity, tuple[Bound, ...]] = self._identity, self._bound
        """Both as the shard has them that serves it now: what is kept again where it refuses something newer."""
        self._conditions: dict[str, str] = {}
        self._certificate = ""
        self._paused = False
        self._closed = True
        """Nothing of it is left with shard and broker, or they find that out by themselves."""
        self._counted = False
        """What its slot dropped is recorded to the end."""
        self.delivered = Trust()
        """What the guest has."""
        self.wanted = False
        self.on_changed: Callable[[], None] = lambda: None
        """Called when something changed that no verb asked for."""

    # -- what it is

    @property
    def served(self) -> bool:
        """Whether a shard serves it now."""
        return self._opened is not None

    @property
    def busy(self) -> bool:
        """Whether something is being done with it."""
        return self._lock.locked()

    @property
    def trust(self) -> Trust:
        """What the guest has to have. Where no document lets anything pass there is nothing that the authority could vouch for: it costs the guest nothing."""
        if not self._identity.egress.documents:
            return Trust()
        return Trust(self._certificate, bindings.environment(self._bound, self._identity.placeholders))

    @property
    def state(self) -> EgressState:
        """What is told of it."""
        return EgressState(revision=self._in_force, conditions=dict(self._conditions))

    @property
    def leases(self) -> bool:
        """Whether the broker has to know of it now."""
        return self.wanted and not self._paused and bool(self._identity.placeholders)

    # -- what the verbs do

    def recall(self, *, running: bool, paused: bool = False) -> None:
        """After a restart of the node: what was kept of it. `running`: it is served as soon as its shard is there, as it was; `paused`: its
        machine stands still, and no credential of it is good."""
        try:
            self._identity = identity.read(self.folder)
            self._bound = bindings.of(self._identity.egress)
        except (OSError, HatchwayError) as error:
            self._identity, self._bound = Identity(), ()
            log.error("%s: %s; nothing leaves it until its policy is set anew", self.sandbox_id, error)
        self._kept = self._identity
        self.wanted, self._paused = running, running and paused
        self._closed = not running
        self._in_force = self._identity.egress.revision

    def say(self, egress: EgressSpec | None) -> None:
        """Of a sandbox that is about to be made: what is to hold from the beginning. It is kept with its opening."""
        if egress is not None:
            self._identity = msgspec.structs.replace(self._identity, egress=egress)
            self._in_force = egress.revision

    async def begin(self, egress: EgressSpec | None) -> None:
        """A member of a pool becomes a sandbox: as `take`, and as `open` where a policy was asked for that cannot hold now."""
        try:
            await self.take(egress)
        except Unavailable:
            if self._is_asked_for():
                raise
        if self._is_asked_for() and "policy_rejected" in self._conditions:
            raise Unprocessable("invalid_policy", self._conditions["policy_rejected"], "Set another policy.")

    async def take(self, egress: EgressSpec | None) -> None:
        """What is to hold from now on, or when it runs next; an older revision changes nothing. Raises what `change` does.

        What is told again is done again where it is kept and its shard does not have it: whoever told it before may have gone in the middle.
        """
        if egress is None:
            return
        if egress != self._identity.egress or (self.served and egress.revision > self._in_force):
            await self.change(egress)

    async def open(self) -> Trust:
        """A machine was made, and its guest is about to run: serves it, with placeholders of its own. Returns what the guest has to get.

        Raises `Unprocessable` (`network_unavailable invalid_policy`) and `Unavailable("gateway_unavailable")` where a policy was asked for, which
        then cannot hold. Raises `OSError`.
        """
        async with self._lock:
            self.wanted, self._paused, self._opened = True, False, None
            self._closed = self._counted = False
            self._conditions.clear()
            self._bound = await asyncio.to_thread(bindings.of, self._identity.egress)
            self._keep(identity.with_placeholders(self._identity, bindings.wanted(self._bound)))
            try:
                await self._serve_soon()
            except (HatchwayError, VmmError, OSError) as error:
                self._note_unserved(error)
                log.warning("%s: it is not served: %s", self.sandbox_id, error)
                if self._is_asked_for():
                    raise self._refused(error) from error
            return self.trust

    async def _serve_soon(self) -> None:
        """Serves a new machine, also where the shard is just being started again. Raises as `_serve`."""
        if not self._all.network:
            raise LaunchRefused("no_network", "This host gives sandboxes no network.")
        until = time.monotonic() + (READY_WITHIN_S if self._is_asked_for() else AT_MOST_S)
        shard = self._all.shard_of(self.project)
        await self._lease()
        while True:
            await shard.ready(max(0.0, until - time.monotonic()))
            # Whatever is served there under this name is a machine's that is no more.
            await self._quietly("gateway.close")
            try:
                return await self._serve()
            except (Unavailable, ConnectionError):
                if time.monotonic() >= until:
                    raise
            await asyncio.sleep(RETRY_S)

    async def change(self, egress: EgressSpec) -> None:
        """Its policy is another one from now on: what is open and not allowed any more is cut on return.

        One that the gateway refuses changes nothing, and is a condition. Raises `Unavailable("gateway_unavailable")` while it cannot be told;
        it is as soon as it can. Raises `OSError`.
        """
        async with self._lock:
            before = self._identity
            if egress.revision < before.egress.revision:
                return
            found = await asyncio.to_thread(bindings.of, egress)
            changed = msgspec.structs.replace(before, egress=egress)
            self._keep(identity.with_placeholders(changed, bindings.wanted(found) if self.wanted else (), before))
            self._bound = found
            if not self.wanted:
                self._in_force = egress.revision
                return
            if not self.served:
                await self._lease()  # what the broker may do for it does not wait for its shard
                self._all.retry_soon(self)
                raise _away(self._conditions.get("gateway_unavailable") or "it is not served now")
            try:
                await self._lease()
                answer = await self._policy()
            except Unprocessable as error:
                log.error("%s: revision %d is refused: %s", self.sandbox_id, egress.revision, error.cause)
                accepted, self._bound = self._accepted
                self._keep(accepted)
                self._conditions["policy_rejected"] = f"Revision {egress.revision}: {error.cause}"
                await self._lease()
            else:
                self._conditions.pop("policy_rejected", None)
                self._take(answer)

    async def pause(self) -> None:
        """The machine stands still: flows are cut, and no credential of it is good, until `resume`."""
        if not self.wanted or self._paused:
            return
        async with self._lock:
            self._paused = True
            await self._revoke()
            await self._quietly("gateway.cut")

    async def resume(self) -> None:
        """The machine is about to go on."""
        if not self.wanted or not self._paused:
            return
        async with self._lock:
            self._paused = False
            await self._lease()

    async def close(self) -> None:
        """The machine is gone, or about to be: flows are cut and credentials revoked on return. May be repeated; what was given up is done again."""
        if self._closed:
            return
        async with self._lock:
            self.wanted = False
            if not self._counted:
                await self._all.last_of(self)
                self._counted = True
            await self._revoke()
            await self._quietly("gateway.close")
            self._closed = True
            self._opened, self._certificate, self.delivered = None, "", Trust()
            self._conditions.clear()
            self._in_force = self._identity.egress.revision
            closed = msgspec.structs.replace(self._identity, placeholders={}, origins={})
            try:
                self._keep(closed)
            except OSError:  # they are good nowhere any more; a full disk keeps them in vain
                self._identity = closed

    # -- what shards and broker do

    async def serve_again(self, *, there: bool) -> bool:
        """Its shard is connected anew, or it could not be served there before; `there`: it has it still. Returns whether it is served now, or need not be."""
        async with self._lock:
            if not self.wanted or self.served:
                return True
            before = dict(self._conditions)
            try:
                await self._serve(there=there)
            except (HatchwayError, VmmError, OSError) as error:
                self._note_unserved(error)
                if self._conditions != before:
                    log.warning("%s: it is not served: %s", self.sandbox_id, error)
            else:
                if self._paused:  # what it was told of a pause may have got lost
                    await self._quietly("gateway.cut")
                self._all.leases.again(self)
        if self.served or self._conditions != before:
            self.on_changed()
        return self.served

    def lost(self) -> None:
        """Its shard is not connected any more."""
        self._opened = None

    def renewed(self, certificate: str) -> None:
        """The authority has another certificate, which the guest has to trust from now on."""
        if self.served:
            self._certificate = certificate
            self.on_changed()

    def note_away(self) -> None:
        """Its shard has been away for so long that it is to be told."""
        if self.wanted and not self.served and "gateway_unavailable" not in self._conditions:
            self._conditions["gateway_unavailable"] = "The gateway process is not there; it is started again by itself."
            self.on_changed()

    async def lease_again(self) -> None:
        """The broker has forgotten it, or its leases are about to end."""
        async with self._lock:
            if not self.leases:
                return
            before = self._conditions.get("credentials_unavailable")
            await self._lease()
        if self._conditions.get("credentials_unavailable") != before:
            self.on_changed()

    # -- how it is done

    def _keep(self, changed: Identity) -> None:
        if changed != self._kept:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            identity.write(self.folder, changed)
            self._kept = changed
        self._identity = changed

    async def _serve(self, *, there: bool = False) -> None:
        """Raises `HatchwayError`, `VmmError`, `OSError`."""
        if not there:
            await self._all.hand_over(self)
        known = self._identity
        spec = GatewaySpec(
            sandbox_id=self.sandbox_id,
            project=self.project,
            generation=self.generation,
            egress=known.egress,
            credentials=self._credentials(),
            ca_key=known.ca_key,
        )
        answer = await self._all.shard_of(self.project).call("gateway.open", spec, GatewayOpened)
        for condition in ("gateway_unavailable", "network_unavailable", "policy_rejected"):
            self._conditions.pop(condition, None)
        self._take(answer)

    def _take(self, answer: GatewayOpened) -> None:
        self._opened, self._certificate, self._in_force = answer, answer.ca_certificate, answer.revision
        self._keep(msgspec.structs.replace(self._identity, ca_key=answer.ca_key))
        self._accepted = self._identity, self._bound

    async def _policy(self) -> GatewayOpened:
        change = GatewayPolicy(
            sandbox_id=self.sandbox_id,
            generation=self.generation,
            egress=self._identity.egress,
            credentials=self._credentials(),
        )
        try:
            return await self._all.shard_of(self.project).call("gateway.policy", change, GatewayOpened)
        except Unavailable as error:
            raise _away(error.cause) from error

    def _credentials(self) -> tuple[CredentialSpec, ...]:
        return tuple(
            CredentialSpec(credential_id=name, placeholder=placeholder)
            for name, placeholder in sorted(self._identity.placeholders.items())
        )

    async def _quietly(self, method: str) -> None:
        """A shard that is not there has no flow; one that does not answer is told when it does."""
        ref = GatewayRef(sandbox_id=self.sandbox_id, generation=self.generation)
        shard = self._all.shard_of(self.project)
        if not shard.connected:
            return
        try:
            await shard.call(method, ref, Empty, within=CLOSE_WITHIN_S)
        except HatchwayError as error:
            log.warning("%s: %s: %s", self.sandbox_id, method, error)

    async def _lease(self) -> None:
        """Has the broker know which credentials it may use. A broker that is not there is a condition: their requests are denied meanwhile."""
        if self._paused:
            return
        granted = bindings.granted(self._bound, self._identity.placeholders)
        unavailable = await self._all.leases.put(self, self._identity.egress.revision, granted)
        if unavailable:
            self._conditions["credentials_unavailable"] = unavailable
        else:
            self._conditions.pop("credentials_unavailable", None)

    async def _revoke(self) -> None:
        if self._identity.placeholders:
            await self._all.leases.revoke(self)

    def _note_unserved(self, error: Exception) -> None:
        self._opened = None
        if isinstance(error, LaunchRefused) or not self._all.network:
            self._conditions["network_unavailable"] = str(error)
        elif isinstance(error, Unprocessable):
            self._conditions["policy_rejected"] = error.cause
        else:
            cause = error.cause if isinstance(error, HatchwayError) else str(error)
            self._conditions["gateway_unavailable"] = cause

    def _is_asked_for(self) -> bool:
        return any(document.tier == "sandbox" for document in self._identity.egress.documents)

    def _refused(self, error: Exception) -> HatchwayError:
        if isinstance(error, Unprocessable):
            return error
        if "network_unavailable" in self._conditions:
            return Unprocessable(
                "network_unavailable",
                f"The sandbox has a policy, and this host can give it no network: {error}",
                "`hatchway doctor` says what is lacking; without a policy it can be made without a network.",
            )
        return _away(str(error))


def _away(why: str) -> Unavailable:
    return Unavailable(
        "gateway_unavailable", f"The gateway of the sandbox cannot be reached: {why}", "Try again in a moment."
    )
