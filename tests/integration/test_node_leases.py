"""What the broker knows of a node's sandboxes, after whoever was away is back: never more than is true of them now."""

import asyncio
import shutil
from collections.abc import AsyncIterator

import pytest
from tests.support.broker_core import Core
from tests.support.node_egress import ID, World, folder, spec, until, world

from hatchway.domain.errors import Exhausted, Internal, Unavailable
from hatchway.node.egress import leases as all_leases
from hatchway.node.egress.gateway import Gateway
from hatchway.wire.broker import Grant, Granted
from hatchway.wire.egress import EgressSpec

__all__ = ["folder", "world"]


@pytest.fixture
async def core(world: World) -> AsyncIterator[Core]:
    made = Core(world.run)
    for name in ("bot", "other"):
        await made.put(name)
    try:
        await made.here()
        yield made
    finally:
        await made.close()


async def opened(world: World, core: Core) -> Gateway:
    """A sandbox that may use a secret."""
    node = world.node()
    node.start()
    gateway = world.gateway(node)
    gateway.say(spec(1, credential=True))
    await gateway.open()
    await until(lambda: core.granted(ID) == ("bot",), "it was not leased")
    return gateway


async def restarted(world: World, *, running: bool = True, paused: bool = False) -> Gateway:
    """The node is another process, which knows what is on disk."""
    await world.nodes[-1].close()
    node = world.node()
    gateway = world.gateway(node)
    gateway.recall(running=running, paused=paused)
    node.start()
    return gateway


async def test_c11_what_was_changed_while_its_shard_was_away_holds_at_once_at_the_broker(
    world: World, core: Core
) -> None:
    gateway = await opened(world, core)
    await world.shard.kill()
    await until(lambda: not gateway.served, "its end was not seen")
    with pytest.raises(Unavailable, match="gateway_unavailable"):
        await gateway.change(spec(2, credential=True, source="other"))
    assert core.granted(ID) == ("other",)
    with pytest.raises(Unavailable, match="gateway_unavailable"):
        await gateway.change(spec(3))
    assert core.granted(ID) == (), "a binding that is taken away is so wherever its gateway is"
    await world.shard.start()
    await until(lambda: gateway.served, "it was not served again")
    assert (gateway.state.revision, core.granted(ID)) == (3, ())


async def test_c11_what_was_changed_while_the_broker_was_away_holds_when_it_is_back(world: World, core: Core) -> None:
    gateway = await opened(world, core)
    for revision, source, granted in ((2, "other", ("other",)), (3, "bot", ("bot",)), (4, None, ())):
        await core.away()
        changed = spec(revision) if source is None else spec(revision, credential=True, source=source)
        await gateway.change(changed)
        await core.here()
        await until(lambda granted=granted: core.granted(ID) == granted, f"{core.granted(ID)} after {revision}")


@pytest.mark.parametrize("verb", ["pause", "close", "delete"])
async def test_c11_a_revoke_that_could_not_be_told_is_told_when_the_broker_is_back(
    world: World, core: Core, verb: str
) -> None:
    gateway = await opened(world, core)
    await core.away()
    await (gateway.pause() if verb == "pause" else gateway.close())
    if verb == "delete":
        shutil.rmtree(world.sandbox)
        world.nodes[-1].forget(ID)
    assert core.granted(ID) == ("bot",)
    await core.here()
    await until(lambda: core.granted(ID) == (), "its grant is still there")
    assert core.audit.kinds()[-1] == "credential.revoked"
    if verb == "pause":
        await gateway.resume()
        assert core.granted(ID) == ("bot",)


@pytest.mark.parametrize("verb", ["pause", "close", "delete", "change"])
async def test_c11_a_revoke_that_could_not_be_told_is_told_by_the_next_node(
    world: World, core: Core, verb: str
) -> None:
    gateway = await opened(world, core)
    await core.away()
    match verb:
        case "pause":
            await gateway.pause()
        case "change":
            await gateway.change(spec(2))
        case _:
            await gateway.close()
    if verb == "delete":
        shutil.rmtree(world.sandbox)
        await world.nodes[-1].close()
        world.node().start()
    else:
        await restarted(world, running=verb != "close", paused=verb == "pause")
    assert core.granted(ID) == ("bot",)
    await core.here()
    await until(lambda: core.granted(ID) == (), "its grant is still there")


async def test_c11_a_node_that_died_in_the_middle_of_an_end_leaves_no_grant(world: World, core: Core) -> None:
    """Its record says that it is about to end: what is on disk has its placeholders still."""
    await opened(world, core)
    gateway = await restarted(world, running=False)
    await until(lambda: core.granted(ID) == (), "its grant is still there")
    await gateway.close()


async def test_c11_a_sandbox_that_was_paused_when_the_node_ended_is_not_leased_for(world: World, core: Core) -> None:
    gateway = await opened(world, core)
    await gateway.pause()
    assert core.granted(ID) == ()
    again = await restarted(world, paused=True)
    await until(lambda: again.served, "it was not taken over")
    other = world.gateway(world.nodes[-1], "other000000000000001")
    other.say(spec(1, credential=True))
    await other.open()
    await until(lambda: core.granted(other.sandbox_id) == ("bot",), "nobody is leased for")
    assert core.granted(ID) == ()
    await again.resume()
    assert core.granted(ID) == ("bot",)


async def test_c11_a_broker_that_forgot_is_told_what_holds_and_nothing_else(world: World, core: Core) -> None:
    gateway = await opened(world, core)
    await core.away()
    core.forget()
    await core.here()
    await until(lambda: core.granted(ID) == ("bot",), "it was not leased again")
    await gateway.close()
    await core.away()
    core.forget()
    await core.here()
    other = world.gateway(world.nodes[-1], "other000000000000001")
    other.say(spec(1, credential=True))
    await other.open()
    await until(lambda: core.granted(other.sandbox_id) == ("bot",), "nobody is leased for")
    assert core.granted(ID) == ()


async def test_c11_a_revoke_that_the_broker_answers_with_an_error_is_told_again(
    world: World, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_leases, "RENEW_EVERY_S", 0.05)
    gateway = await opened(world, core)
    revoke, failures = core.grants.revoke, 0

    async def fails(sandbox_id: str, generation: int) -> Grant | None:
        nonlocal failures
        failures += 1
        if failures < 3:
            raise Internal("internal", "It failed.", "")
        return await revoke(sandbox_id, generation)

    monkeypatch.setattr(core.grants, "revoke", fails)
    await gateway.close()
    world.nodes[-1].forget(ID)
    assert core.granted(ID) == ("bot",)
    await until(lambda: core.granted(ID) == (), "its grant is still there")


async def test_c11_a_grant_that_the_broker_refuses_leaves_none(
    world: World, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the policy has taken away must not stay because what it gives besides cannot be granted."""
    gateway = await opened(world, core)

    async def refuses(grant: Grant) -> Granted:
        raise Exhausted("too_many_grants", "There are too many.", "Delete sandboxes.")

    monkeypatch.setattr(core.grants, "put", refuses)
    await gateway.change(spec(2, credential=True, source="other"))
    assert gateway.state.conditions["credentials_unavailable"] == "There are too many."
    await until(lambda: core.granted(ID) == (), "the former grant is in force")


async def test_c11_a_grant_that_was_given_up_in_the_middle_is_revoked_with_its_binding(
    world: World, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever had it told may go before the answer comes: the broker has it all the same."""
    node = world.node()
    node.start()
    gateway = world.gateway(node)
    gateway.say(EgressSpec(revision=1))
    await gateway.open()
    await until(lambda: gateway.served, "it was not served")
    put, entered = core.grants.put, asyncio.Event()

    async def slow(grant: Grant) -> Granted:
        answer = await put(grant)
        entered.set()
        await asyncio.Event().wait()
        return answer

    monkeypatch.setattr(core.grants, "put", slow)
    telling = asyncio.ensure_future(gateway.change(spec(2, credential=True)))
    await entered.wait()
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)
    monkeypatch.setattr(core.grants, "put", put)
    assert core.granted(ID) == ("bot",)
    await gateway.change(spec(3))
    assert core.granted(ID) == ()


async def test_g01_an_end_that_was_given_up_in_the_middle_is_repeated(world: World, core: Core) -> None:
    """A deletion takes the place of a suspension that is closing its gateway."""
    gateway = await opened(world, core)
    held = asyncio.Event()

    async def last(_: Gateway) -> None:
        held.set()
        await asyncio.Event().wait()

    node = world.nodes[-1]
    told, node.last_of = node.last_of, last  # type: ignore[method-assign]
    closing = asyncio.ensure_future(gateway.close())
    await held.wait()
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    node.last_of = told  # type: ignore[method-assign]
    await gateway.close()
    assert (core.granted(ID), await world.served()) == ((), [])


async def test_a_full_disk_leases_nothing_for_a_machine_that_is_gone(
    world: World, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await opened(world, core)
    monkeypatch.setattr("hatchway.node.egress.identity.write", _full)
    await gateway.close()
    await gateway.lease_again()
    assert core.granted(ID) == ()
    assert not gateway.leases


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")
