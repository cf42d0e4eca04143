"""The node's side of the gateways, against a real shard and a real audit writer as processes: what is served, and served again."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.node_egress import ID, WITHIN_S, Broker, World, folder, played, spec, until, world

from hatchway.domain.errors import HatchwayError, Unavailable, Unprocessable
from hatchway.node.egress import gateway as one_gateway
from hatchway.node.egress import gateways as all_gateways
from hatchway.node.egress import identity
from hatchway.node.egress import leases as all_leases
from hatchway.node.egress.gateways import Gateways
from hatchway.node.vmm.seam import LaunchRefused
from hatchway.wire import egress
from hatchway.wire.egress import AskAnswer, Asked, AskEnded, EgressSpec, GatewayList, PolicyDocument
from hatchway.wire.message import Empty
from hatchway.wire.rpc import Connection

__all__ = ["folder", "played", "world"]


async def test_it_is_served_before_its_guest_runs_and_forgotten_when_it_is_closed(world: World) -> None:
    node = world.node()
    node.start()
    gateway = world.gateway(node)
    gateway.say(spec(3))
    trust = await gateway.open()
    assert "BEGIN CERTIFICATE" in trust.certificate
    assert await world.served() == [ID]
    assert (gateway.state.revision, gateway.state.conditions) == (3, {})
    file = world.sandbox / identity.FILE
    assert file.stat().st_mode & 0o777 == 0o600
    key = identity.read(world.sandbox).ca_key
    await gateway.close()
    assert await world.served() == []
    await gateway.open()
    assert identity.read(world.sandbox).ca_key == key, "programs that trust its authority go on"


async def test_c11_placeholders_are_of_one_run_and_gone_with_it(world: World) -> None:
    node = world.node()
    node.start()
    gateway = world.gateway(node)
    gateway.say(spec(1, credential=True))
    first = (await gateway.open()).env["BOT"]
    assert len(first) >= 32
    assert "credentials_unavailable" in gateway.state.conditions, "there is no broker here"
    await gateway.change(spec(2, "b.example", credential=True))
    assert gateway.trust.env["BOT"] == first, "a change of the policy leaves what the guest has"
    await gateway.change(spec(3, "b.example"))
    assert gateway.trust.env == {}
    await gateway.change(spec(4, credential=True, credentials=()))
    assert gateway.trust.env == {}, "its policy binds it, and the sandbox may not use it"
    await gateway.change(spec(5, credential=True))
    second = gateway.trust.env["BOT"]
    await gateway.close()
    assert identity.read(world.sandbox).placeholders == {}
    third = (await gateway.open()).env["BOT"]
    assert len({first, second, third}) == 3


async def test_g01_a_killed_shard_is_told_everything_again(world: World) -> None:
    node = world.node()
    node.start()
    gateway = world.gateway(node)
    gateway.say(spec(1))
    trust = await gateway.open()
    changed = asyncio.Event()
    gateway.on_changed = changed.set
    await world.shard.kill()
    await until(lambda: not gateway.served, "its end was not seen")
    with pytest.raises(Unavailable, match="gateway_unavailable"):
        await gateway.change(spec(2, "b.example"))
    assert gateway.state.revision == 1, "nobody has said that the newer one holds"
    await world.shard.start()
    async with asyncio.timeout(WITHIN_S):
        await changed.wait()
    await until(lambda: gateway.served, "it was not served again")
    assert await world.served() == [ID]
    assert (gateway.state.revision, gateway.state.conditions) == (2, {}), "and with the newest"
    assert gateway.trust.certificate != trust.certificate, "the names that it vouches for have changed"


async def test_a_restarted_node_goes_on_with_what_is_served_and_closes_what_is_nobodys(world: World) -> None:
    before = world.node()
    before.start()
    gateway = world.gateway(before)
    gateway.say(spec(1))
    await gateway.open()
    await before.close()

    after = world.node()
    again = world.gateway(after)
    again.recall(running=True)
    assert again.state.revision == 1
    after.start()
    await until(lambda: again.served, "it was not taken over")
    assert world.slots.asked == 1, "the shard has its listeners: flows that are open go on"
    await after.close()

    forgetful = world.node()
    forgetful.start()
    async with asyncio.timeout(WITHIN_S):
        while await world.served():
            await asyncio.sleep(0.01)


async def test_a_restarted_node_grants_nothing_to_one_that_is_paused(world: World, played: Broker) -> None:
    await played.start()
    before = world.node()
    before.start()
    gateway = world.gateway(before)
    gateway.say(spec(1, credential=True))
    await gateway.open()
    await gateway.pause()
    await before.close()
    played.asked.clear()

    after = world.node()
    again = world.gateway(after)
    again.recall(running=True, paused=True)
    other = world.gateway(after, "other000000000000001")
    other.say(spec(1, credential=True))
    after.start()
    await other.open()
    await until(lambda: again.served, "it was not taken over")
    assert not again.leases
    # The other one may have been leased for twice: by its opening, and because the broker was connected just then.
    assert set(played.asked) == {"other000000000000001"}, "the broker was asked for one that stands still"
    await again.resume()
    assert ID in played.asked


async def test_a_policy_is_refused_where_it_cannot_hold_and_nothing_asked_for_runs_without(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_gateway, "READY_WITHIN_S", 0.2)
    monkeypatch.setattr(one_gateway, "AT_MOST_S", 0.1)
    node = world.node()
    node.start()
    gateway = world.gateway(node)
    gateway.say(spec(1))
    world.slots.refuses = LaunchRefused("no_network", "its slot has none")
    with pytest.raises(Unprocessable, match="network_unavailable"):
        await gateway.open()
    await gateway.close()
    gateway.say(spec(1, tier="project"))
    assert (await gateway.open()).certificate == ""
    assert list(gateway.state.conditions) == ["network_unavailable"]
    world.slots.refuses = None
    await gateway.close()
    await world.shard.kill()
    gateway.say(spec(1))
    with pytest.raises(Unavailable, match="gateway_unavailable"):
        await gateway.open()
    await gateway.close()
    gateway.say(EgressSpec(revision=2))
    await gateway.open()
    assert list(gateway.state.conditions) == ["gateway_unavailable"]
    # It is served as soon as it can be, although nobody asks for it again.
    await world.shard.start()
    await until(lambda: gateway.served, "it was not served when its shard was there")
    assert gateway.state.conditions == {}


async def test_g01_one_that_could_not_be_served_is_served_as_soon_as_it_can(world: World) -> None:
    """Its shard is there all the time."""
    node = world.node()
    node.start()
    gateway = world.gateway(node)
    gateway.say(spec(1, tier="project"))
    world.slots.refuses = LaunchRefused("no_slot", "the launcher is being started again")
    await gateway.open()
    asked = world.slots.asked
    await until(lambda: world.slots.asked > asked, "nobody tried again")
    assert list(gateway.state.conditions) == ["network_unavailable"]
    with pytest.raises(Unavailable, match="gateway_unavailable"):
        await gateway.change(spec(2, "b.example"))
    changed = asyncio.Event()
    gateway.on_changed = changed.set
    world.slots.refuses = None
    await until(lambda: gateway.served, "it was not served when it could be")
    assert (gateway.state.revision, gateway.state.conditions) == (2, {})
    assert changed.is_set()


async def test_g02_a_policy_that_the_gateway_refuses_leaves_the_former_one(world: World) -> None:
    node = world.node()
    node.start()
    gateway = world.gateway(node)
    gateway.say(spec(1))
    await gateway.open()
    bad = EgressSpec(
        revision=2, documents=(PolicyDocument(tier="sandbox", name="web", version=2, text='{"version": 9}'),)
    )
    await gateway.change(bad)
    assert gateway.state.revision == 1
    assert "policy_rejected" in gateway.state.conditions
    await world.shard.kill()
    await until(lambda: not gateway.served, "its end was not seen")
    await world.shard.start()
    await until(lambda: gateway.served, "it was not served again")
    assert gateway.state.revision == 1, "the one that was good is what it is served with again"
    await gateway.change(spec(1, "old.example"))
    await gateway.change(spec(3, "b.example"))
    assert (gateway.state.revision, gateway.state.conditions) == (3, {})
    await gateway.change(spec(2, "old.example"))
    assert gateway.state.revision == 3, "an older revision changes nothing"


async def test_g02_a_change_that_was_given_up_in_the_middle_is_made_when_it_is_told_again(
    world: World, played: Broker
) -> None:
    """Whoever tells a change may die while the broker is asked, before the shard is."""
    await played.start()
    node = world.node()
    node.start()
    gateway = world.gateway(node)
    gateway.say(spec(1, credential=True))
    await gateway.open()
    await until(lambda: gateway.state.conditions == {}, "the broker was not told of it")
    bad = EgressSpec(
        revision=2, documents=(PolicyDocument(tier="sandbox", name="web", version=2, text='{"version": 9}'),)
    )
    for newer in (bad, spec(3, "b.example", credential=True)):
        former = identity.read(world.sandbox)
        played.silent, before = {ID}, len(played.asked)
        telling = asyncio.ensure_future(gateway.take(newer))
        await until(lambda before=before: len(played.asked) > before, "the broker was not asked")
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        assert gateway.state.revision == 1, "the shard does not know it"
        played.silent = set()
        await gateway.take(newer)
        if newer is bad:
            assert "policy_rejected" in gateway.state.conditions
            assert identity.read(world.sandbox) == former, "what is good is kept, with its placeholders"
    assert (gateway.state.revision, gateway.state.conditions) == (3, {})


async def test_credentials_that_are_slow_for_a_project_hold_up_no_other(world: World, played: Broker) -> None:
    node = world.node()
    node.start()
    slow = [world.gateway(node, f"slow{n:016}") for n in range(all_leases.AT_ONCE_OF_PROJECT + 1)]
    other = world.gateway(node, "other000000000000001", "other")
    for gateway in (*slow, other):
        gateway.say(spec(1, credential=True))
        await gateway.open()
        assert "not there" in gateway.state.conditions["credentials_unavailable"]
    played.silent = {one.sandbox_id for one in slow}
    await played.start()
    await until(lambda: other.state.conditions == {}, "it waits for those of another project")
    assert all("not there" in one.state.conditions["credentials_unavailable"] for one in slow), "they wait still"
    assert len(set(played.asked)) == all_leases.AT_ONCE_OF_PROJECT + 1
    played.silent = set()
    played.speaks.set()
    await until(lambda: not any(one.state.conditions for one in slow), "they were not leased when they could be")
    assert len(played.connections) == 1


async def test_a_grant_that_is_not_answered_takes_the_connection_from_nobody(
    world: World, played: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_leases, "PUT_WITHIN_S", 0.2)
    monkeypatch.setattr(all_leases, "RETRY_S", 0.1)
    await played.start()
    node = world.node()
    node.start()
    gateway = world.gateway(node)
    gateway.say(spec(1, credential=True))
    played.silent = {ID}
    await gateway.open()
    await until(
        lambda: "has not answered" in gateway.state.conditions["credentials_unavailable"],
        "it does not say what is lacking",
    )
    played.silent = set()
    await until(lambda: gateway.state.conditions == {}, "it was not asked again")
    assert len(played.connections) == 1


async def test_a_shard_that_stays_away_is_told_by_its_sandboxes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_gateways, "AWAY_AFTER_S", 0.1)
    node = world.node()
    node.start()
    gateway = world.gateway(node)
    gateway.say(spec(1))
    await gateway.open()
    await world.shard.kill()
    await until(lambda: "gateway_unavailable" in gateway.state.conditions, "it did not say so")
    await world.shard.start()
    await until(lambda: gateway.state.conditions == {}, "it still says so")


async def test_what_is_held_is_told_answered_and_ended_with_its_shard(folder: Path) -> None:
    """The shard is played here: it takes a request of a guest that is held for a real one to ask."""
    asked = Asked(
        ask_id="ask1",
        sandbox_id=ID,
        project="default",
        generation=1,
        rule="r",
        host="a.example",
        port=443,
        protocol="http",
    )
    answers: list[AskAnswer] = []
    connections: list[Connection] = []

    async def handle(method: str, raw: msgspec.Raw) -> object:
        if method == "gateway.answer":
            answers.append(msgspec.msgpack.decode(raw, type=AskAnswer))
        if method == "gateway.list":
            return GatewayList(gateways=())
        return egress.AskList(asks=(asked,)) if method == "gateway.asks" else Empty()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def handler(method: str) -> Any:
            return lambda _, raw: handle(method, raw)

        connection = Connection(reader, writer, {method: handler(method) for method in egress.METHODS})
        connections.append(connection)
        await connection.run()

    server = await asyncio.start_unix_server(accept, str(folder / egress.SOCKET.format(shard=0)))
    launcher: Any = None
    node = Gateways(folder, 1, launcher)
    told: list[Asked] = []
    ended: list[AskEnded] = []
    node.on_asked, node.on_ask_ended = told.append, ended.append
    node.of(ID, "default", 1, folder)
    node.start()
    try:
        await until(lambda: told == [asked], "what was held when it was connected was not told")
        assert node.asks() == (asked,)
        await node.answer(AskAnswer(ask_id="ask1", sandbox_id=ID, generation=1, allow=True))
        assert [one.ask_id for one in answers] == ["ask1"]
        assert node.asks() == ()
        other = msgspec.structs.replace(asked, ask_id="ask2")
        connections[-1].notify("gateway.asked", other)
        connections[-1].notify("gateway.asked", msgspec.structs.replace(asked, ask_id="ask3", sandbox_id="strange"))
        await until(lambda: node.asks() == (other,), "what is held now was not told")
        connections[-1].notify("gateway.ask_ended", AskEnded(ask_id="ask2", sandbox_id=ID, why="timeout"))
        await until(lambda: [one.ask_id for one in ended] == ["ask2"], "its end was not told")
        with pytest.raises(HatchwayError, match="unknown_sandbox"):
            await node.answer(AskAnswer(ask_id="x", sandbox_id="strange", generation=1, allow=True))
    finally:
        await node.close()
        server.close()
        for connection in connections:
            with contextlib.suppress(OSError):
                await connection.close()
