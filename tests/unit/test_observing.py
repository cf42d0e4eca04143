"""Who may read the metrics of a node, what a metrics token must be, how log files are read, and that the metrics are documented."""

import asyncio
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.routing import Route

from hatchway.cli.journal import _plain
from hatchway.cli.top import Rounds
from hatchway.client import HostUsage, SandboxInfo, SandboxMetrics
from hatchway.control import metrics as control_metrics
from hatchway.domain.errors import Forbidden, HatchwayError, Unprocessable
from hatchway.launcher import log as launcher_log
from hatchway.node import metrics as node_metrics
from hatchway.node import scrape, usage
from hatchway.node.dataplane.app import make_app
from hatchway.node.dataplane.tokens import TokenChecker
from hatchway.supervisor import configuration, journal, profile
from hatchway.supervisor.settings import Settings
from hatchway.wire import metrics as common

ROOT = Path(__file__).parents[2]
TOKEN = "m" * 24


# -- who may read


@pytest.mark.parametrize(
    ("access", "headers", "code"),
    [
        (common.MetricsAccess(local=False), {}, "metrics_closed"),
        (common.MetricsAccess(), {"host": "7-abc.localhost.example"}, "metrics_closed"),
        (common.MetricsAccess(common.hash_token(TOKEN)), {}, "metrics_token_wrong"),
        (
            common.MetricsAccess(common.hash_token(TOKEN)),
            {"authorization": "Bearer eyJ0.eyJ1.c2ln"},
            "metrics_token_wrong",
        ),
    ],
)
async def test_the_metrics_of_a_node_are_not_for_tenants(
    access: common.MetricsAccess, headers: dict[str, str], code: str
) -> None:
    nothing = cast(Any, None)  # a refusal looks at nothing
    route = Route("/metrics", scrape.Metrics(nothing, nothing, nothing, access), methods=["GET"])
    app = make_app(nothing, TokenChecker(), nothing, routes=[route])
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        answer = await http.get("/metrics", headers=headers)
    assert answer.status_code in (401, 403)
    assert answer.json()["code"] == code
    assert "hatchway_" not in answer.text


@pytest.mark.parametrize(
    ("peer", "host", "allowed"),
    [
        ("127.0.0.1", "127.0.0.1:7070", True),
        ("::1", "[::1]:7070", True),
        ("::1", "[::1]", True),
        ("127.0.0.1", "localhost", True),
        ("192.0.2.7", "127.0.0.1:7070", False),
        ("127.0.0.1", "evil.example", False),
        ("127.0.0.1", "", False),
        ("", "localhost", False),
    ],
)
def test_without_a_token_only_this_machine_reads_them(peer: str, host: str, allowed: bool) -> None:
    try:
        common.MetricsAccess().check(peer=peer, host=host, authorization=None)
    except HatchwayError:
        assert not allowed
    else:
        assert allowed


def test_a_token_is_read_from_a_file_that_nobody_else_can_read(tmp_path: Path) -> None:
    settings_file, token_file = tmp_path / "hatchway.toml", tmp_path / "metrics.token"
    settings_file.write_text('[metrics]\ntoken_file = "metrics.token"\n')
    settings_file.chmod(0o600)
    settings = configuration.settings(tmp_path, settings_file)
    assert settings.metrics_token == token_file
    with pytest.raises(Unprocessable) as refused:
        profile.load_metrics(settings)
    assert refused.value.code == "metrics_token_unusable"
    token_file.write_text(TOKEN + "\n")
    token_file.chmod(0o644)
    with pytest.raises(Forbidden) as insecure:
        profile.load_metrics(settings)
    assert insecure.value.code == "config_insecure"
    token_file.chmod(0o600)
    access = profile.load_metrics(settings)
    access.check(peer="192.0.2.7", host="metrics.example", authorization=f"Bearer {TOKEN}")
    for bad in ("short", "two words of a token", "ü" * 30, ""):
        token_file.write_text(bad)
        with pytest.raises(Unprocessable):
            profile.load_metrics(settings)


def test_production_without_a_token_shows_them_to_nobody(tmp_path: Path) -> None:
    access = profile.load_metrics(Settings(data_dir=tmp_path, profile="production"))
    with pytest.raises(Forbidden):
        access.check(peer="127.0.0.1", host="localhost", authorization="Bearer ")


# -- log files


def line(at: int, event: str, **more: str) -> str:
    return json.dumps({"timestamp": f"2030-01-01T00:00:{at:02}Z", "event": event, "level": "info", **more}) + "\n"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "log").mkdir()
    return Settings(data_dir=tmp_path)


def test_the_files_of_all_roles_are_read_as_one(settings: Settings) -> None:
    (settings.log / "node.log.1").write_text(line(1, "first", request_id="a"))
    (settings.log / "node.log").write_text(line(4, "fourth", request_id="a") + "Traceback:\n" + line(5, "fifth"))
    (settings.log / "control.log").write_text(line(2, "second", request_id="a") + line(3, "third", request_id="b"))
    shown = journal.last(settings, journal.Wanted(), 100)
    assert [one["event"] for one in shown] == ["first", "second", "third", "fourth", "Traceback:", "fifth"]
    assert [one["role"] for one in shown[:2]] == ["node", "control"]
    of_one = journal.last(settings, journal.Wanted(members={"request_id": "a"}), 100)
    assert [one["event"] for one in of_one] == ["first", "second", "fourth"]
    assert [one["event"] for one in journal.last(settings, journal.Wanted(), 2)] == ["Traceback:", "fifth"]
    assert [one["event"] for one in journal.last(settings, journal.Wanted(level="error"), 9)] == ["Traceback:"]


def test_a_file_is_followed_when_it_is_emptied(settings: Settings) -> None:
    path = settings.log / "node.log"
    path.write_text(line(1, "before"))
    with journal.Tail(path, "node", from_start=False) as tail, path.open("a") as writing:
        assert not list(tail.read())
        writing.write(line(2, "whole") + '{"event": "ha')
        writing.flush()
        assert [one["event"] for one in tail.read()] == ["whole"]
        writing.write('lf"}\n')
        writing.flush()
        assert [one["event"] for one in tail.read()] == ["half"]
        os.truncate(path, 0)
        writing.write(line(3, "after"))
        writing.flush()
        assert [one["event"] for one in tail.read()] == ["after"]


def test_a_line_without_end_is_bounded(settings: Settings) -> None:
    path = settings.log / "node.log"
    path.write_bytes(b"x" * (3 << 20) + b"\n" + line(1, "next").encode())
    first, second = journal.last(settings, journal.Wanted(), 9)
    assert len(first["event"]) <= journal.MAX_LINE
    assert second["event"] == "next"


def test_what_stands_in_a_line_does_not_steer_the_terminal() -> None:
    assert _plain("a\x1b[2J\nb\u202ec") == "a\\x1b[2J\\nb\\u202ec"


def test_the_launcher_writes_one_line_for_each_event_and_no_flood(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000.0
    monkeypatch.setattr(launcher_log.time, "time", lambda: now)
    monkeypatch.setattr(launcher_log._Flow, "second", 0)
    launcher_log.say("a\nb\x1b[31m", level="warning", request_id="r" * 100, sandbox_id="s")
    for _ in range(1_000):
        launcher_log.say("flood")
    now += 1.0
    launcher_log.say("x" * 100_000)
    first, *flood, last = [json.loads(text) for text in capsys.readouterr().err.splitlines()]
    assert first == {
        "role": "launcher",
        "event": "a\nb\x1b[31m",
        "level": "warning",
        "sandbox_id": "s",
        "request_id": "r" * 64,
        "timestamp": "1970-01-01T00:16:40.000000Z",
    }
    assert len(flood) == launcher_log.BURST - 1
    assert last["suppressed"] == 1_001 - launcher_log.BURST
    assert len(last["event"]) == launcher_log.MAX_TEXT


# -- use


def test_shares_of_the_cpu_are_of_the_time_between_two_looks() -> None:
    looks = iter([(1.0, 10.0), (3.0, 11.0), (4.0, 0.5), (4.0, 0.5)])

    def look(sandbox_id: str) -> SandboxMetrics:
        at, cpu_s = next(looks)
        return SandboxMetrics(sandbox_id=sandbox_id, state="running", observed_at=at, host=HostUsage(cpu_s=cpu_s))

    sandboxes = SimpleNamespace(list=lambda: [SandboxInfo(id="a", state="running")], metrics=look)
    rounds = Rounds(cast(Any, SimpleNamespace(client=SimpleNamespace(sandboxes=sandboxes))))
    assert [rounds.next()[0].cpu for _ in range(4)] == [None, 50.0, 0.0, None]


def test_what_the_host_cannot_count_is_nothing(tmp_path: Path) -> None:
    assert usage.cpu_s(os.getpid()) > 0
    assert usage.cpu_s(2**30) == 0.0
    assert usage.disk_bytes(tmp_path / "missing") == 0
    own, shared = tmp_path / "own", tmp_path / "shared"
    own.mkdir()
    (own / "disk").write_bytes(b"x" * 100_000)
    (own / "link").symlink_to("/proc/kcore")
    shared.write_bytes(b"x" * 1_000_000)
    (own / "base").hardlink_to(shared)  # the memory of a bake, which all sandboxes made of it have
    assert 100_000 <= usage.disk_bytes(own) < 200_000


async def test_a_guest_that_does_not_answer_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "GUEST_WITHIN_S", 0.01)

    class Silent:
        async def metrics(self) -> None:
            await asyncio.Event().wait()

    (tmp_path / "disk").write_bytes(b"x" * 100_000)
    held = SimpleNamespace(name="a", pid=0, folder=tmp_path)
    told = await usage.of(cast(Any, held), "running", cast(Any, Silent()), cast(Any, None))
    assert told.guest is None
    assert "did not answer" in told.guest_error
    assert told.host.disk_bytes >= 100_000


# -- documentation


def names() -> set[str]:
    registries: tuple[CollectorRegistry, ...] = (common.COMMON, control_metrics.REGISTRY, node_metrics.REGISTRY)
    found = {family.name for registry in registries for family in registry.collect()}
    for module in ("control/scrape.py", "node/scrape.py"):
        text = (ROOT / "src/hatchway" / module).read_text()
        found |= {f"hatchway_{name}" for name in re.findall(r'gauge\(\s*"(\w+)"', text)}
        found |= {f"hatchway_{name}" for name in re.findall(r'add_counts\(\s*registry, "(\w+)"', text)}
    return found


def test_every_metric_is_documented_and_no_other() -> None:
    text = (ROOT / "docs" / "observability.md").read_text()
    said = {re.sub("_total$", "", name) for name in re.findall(r"^\| `(hatchway_\w+)", text, re.M)}
    assert said == names()
