"""The ways by which a name comes to have an address in a sandbox, each within the same bounds: asked for, remembered from before a restart, taken home."""

import asyncio

import pytest
from tests.support.egress_fixtures import Ground, ground, is_reset, rule, spec
from tests.support.fake_internet import web

from hatchway.egress.synthetic import SyntheticNames

__all__ = ["ground"]

CLEAR = {"ports": [80], "tls": {"mode": "none"}}


def homes(count: int) -> list[tuple[str, str]]:
    """Names below a wildcard, and the addresses that they would get."""
    names = [f"n{number}.wild.example" for number in range(count)]
    return [(name, str(SyntheticNames().bind(name))) for name in names]


async def remembered(ground: Ground, name: str, address: str) -> bool:
    """Whether a connection to an address that a program remembers is let through as far as TLS."""
    sock = ground.slot.guest_socket()
    await asyncio.get_running_loop().sock_connect(sock, (address, 443))
    try:
        async with asyncio.timeout(20):
            _, writer = await asyncio.open_connection(sock=sock, ssl=ground.trusting(), server_hostname=name)
    except OSError:
        return False
    writer.close()
    return True


async def taken_home(ground: Ground, name: str) -> bytes:
    """What the guest is answered who asks an unbound address for a name."""
    reader, writer = await ground.connect("93.184.216.34", 80)
    writer.write(f"GET / HTTP/1.1\r\nHost: {name}\r\n\r\n".encode())
    try:
        async with asyncio.timeout(20):
            return await reader.readuntil(b"\r\n")
    except (ConnectionResetError, asyncio.IncompleteReadError):
        return b""
    finally:
        writer.close()


async def test_d21_names_that_a_program_remembers_are_new_names_like_others(ground: Ground, caplog):
    gateway = ground.open(spec(rule("wild", "*.wild.example"), dns={"wildcard_names_per_min": 2}))
    assert [await remembered(ground, *one) for one in homes(4)] == [True, True, False, False]
    assert ground.records.denied("egress.connection") == ["names_rate", "names_rate"]
    assert len(gateway.names) == 2
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


async def test_d21_a_full_table_refuses_names_that_a_program_remembers_and_no_flow_fails(ground: Ground, caplog):
    ground.open(spec(rule("wild", "*.wild.example"), dns={"max_names": 2}))
    assert [await remembered(ground, *one) for one in homes(4)] == [True, True, False, False]
    assert ground.records.denied("egress.connection") == ["names_exhausted", "names_exhausted"]
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("bound", "reason"), [({"wildcard_names_per_min": 2}, "names_rate"), ({"max_names": 2}, "names_exhausted")]
)
async def test_d21_names_that_are_taken_home_are_bounded_and_nobody_is_asked_for_more(
    ground: Ground, bound: dict[str, int], reason: str, caplog
):
    """What is taken home is resolved outside: without a bound, each name would carry a label out."""
    names = [name for name, _ in homes(5)]
    await ground.internet.site(*names, port=80, handler=web)
    home = rule("wild", "*.wild.example", **CLEAR)
    home["resolve"]["rehome"] = True
    ground.open(spec(home, dns=bound))
    assert [(await taken_home(ground, name))[9:12] for name in names] == [b"200", b"200", b"", b"", b""]
    assert set(ground.internet.names.asked) == set(names[:2])
    assert ground.records.denied("egress.connection") == [reason] * 3
    assert (await taken_home(ground, names[0]))[9:12] == b"200", "a known one goes on"
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


async def test_d21_an_unbound_address_stays_one_whatever_name_is_said_there(ground: Ground):
    ground.open(spec(rule("wild", "*.wild.example")))
    name, _ = homes(1)[0]
    _, other = homes(2)[1]
    sock = ground.slot.guest_socket()
    await asyncio.get_running_loop().sock_connect(sock, (other, 443))
    reader, writer = await asyncio.open_connection(sock=sock)
    writer.write(b"GET / HTTP/1.1\r\nHost: " + name.encode() + b"\r\n\r\n")
    assert await is_reset(reader, writer)
    assert ground.records.denied("egress.connection") == ["dst_unbound"]
