"""Archives of real sandboxes: out of one, into another, with memory or without, under a passphrase, and never by halves."""

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Service
from test_snapshots import snapshot
from test_suspend import COUNTER, Verbs, verbs

from hatchway.client import Output, Sandbox, Snapshot, Unprocessable

pytestmark = pytest.mark.vm
__all__ = ["verbs"]


class Archives:
    """Exports and imports over the API and the data plane."""

    def __init__(self, verbs: Verbs) -> None:
        self.verbs = verbs

    def export(self, sandbox: Sandbox, **body: Any) -> str:
        """Makes an archive; returns its id."""
        return str(self.verbs.do(sandbox, "export", **body)["operation"]["result"]["export"])

    def right(self, path: str) -> tuple[str, dict[str, str]]:
        """Where an archive goes to or comes from, and with which headers."""
        answer = self.verbs.http.post(path)
        assert answer.status_code == 201, answer.text
        return answer.json()["url"], {"authorization": f"Bearer {answer.json()['token']}"}

    def fetch(self, export: str, headers: dict[str, str] | None = None) -> httpx.Response:
        """Downloads an archive."""
        url, right = self.right(f"/v1/exports/{export}/token")
        return httpx.get(url, headers={**right, **(headers or {})}, timeout=60)

    def bring(self, octets: bytes, passphrase: str | None = None) -> str:
        """Uploads an archive, in two pieces; returns the upload's id."""
        url, right = self.right("/v1/uploads")
        at = url.removesuffix("/content")
        half = len(octets) // 2
        assert httpx.put(url, params={"offset": 0}, content=octets[:half], headers=right).json() == {"offset": half}
        again = httpx.put(url, params={"offset": 0}, content=octets[:10], headers=right)
        assert (again.status_code, again.json()["code"], again.json()["offset"]) == (409, "upload_offset", half)
        assert httpx.get(at, headers=right).json() == {"offset": half}
        done = httpx.put(url, params={"offset": half}, content=octets[half:], headers=right)
        assert done.json() == {"offset": len(octets)}
        opened = httpx.post(f"{at}/open", headers={**right, **secret(passphrase)}, timeout=60)
        if opened.status_code != 200:
            raise Refused(opened.json()["code"])
        return at.rsplit("/", 1)[1]

    def take_in(self, octets: bytes, passphrase: str | None = None, **body: Any) -> dict[str, Any]:
        """Uploads and imports; returns the sandbox or the snapshot, or raises `Refused`."""
        upload = self.bring(octets, passphrase)
        answer = self.verbs.http.post("/v1/imports", json={"upload": upload, **body})
        if answer.status_code not in (200, 202):
            raise Refused(answer.json()["code"])
        found = answer.json()
        if found["operation"]["status"] != "succeeded":
            left = {"sandbox": ("deleted",), "snapshot": ("deleting", "deleted")}[found["made"]]
            assert found[found["made"]]["state"] in left, found
            raise Refused(found["operation"]["error"]["code"])
        return dict(found[found["made"]])


class Refused(Exception):
    """The code of a refusal."""


def secret(passphrase: str | None) -> dict[str, str]:
    if passphrase is None:
        return {}
    return {"hatchway-passphrase": base64.urlsafe_b64encode(passphrase.encode()).decode()}


def left(service: Service) -> set[str]:
    """What lies in the node's folder for sandboxes, snapshots, imports and uploads."""
    node = service.data_dir / "node"
    found = {f"sandbox {path.name}" for path in (node / "sandboxes").iterdir() if not path.name.startswith(".")}
    for folder in (node / "sandboxes" / ".imports", node / "snapshots", node / "uploads"):
        found |= {str(path.relative_to(node)) for path in folder.glob("*") if path.suffix not in (".json", ".archive")}
    return found


def test_there_and_back(service: Service, verbs: Verbs, tmp_path: Path) -> None:
    archives = Archives(verbs)
    with (
        service.client() as hatchway,
        hatchway.sandboxes.create(memory_mib=256, metadata={"k": "v"}, env={"A": "b"}) as source,
    ):
        counter = source.start(["python3", "-c", COUNTER])
        for event in counter:
            if isinstance(event, Output) and b"3\n" in event.data:
                break
        source.run("echo memory > /dev/shm/m; head -c 3000000 /dev/urandom > disk; sync; sha256sum disk > sum")
        value = source.run("cat /dev/shm/m sum").stdout
        refused = verbs.http.post(f"/v1/sandboxes/{source.id}/export", json={})
        assert (refused.status_code, refused.json()["code"]) == (409, "wrong_state")
        verbs.do(source, "suspend")
        export = archives.export(source)
        answer = verbs.http.get(f"/v1/exports/{export}")
        assert answer.status_code == 200, answer.text
        shown = answer.json()["export"]
        assert shown["state"] == "ready"
        plain = archives.fetch(export)
        octets = plain.content
        assert plain.status_code == 200
        assert len(octets) == shown["size_bytes"] < 150 << 20
        assert plain.headers["hatchway-digest"] == shown["digest"]
        sealed = archives.fetch(export, secret("open sesame")).content
        assert b"HWARCHIV" not in sealed[:4096]
        part = archives.fetch(export, {**secret("open sesame"), "range": "bytes=70000-200000"})
        assert (part.status_code, part.content) == (206, sealed[70000:200001])

        # Into a new one, with its memory: what ran runs on, under an identity and sessions of its own.
        made = archives.take_in(sealed, "open sesame")
        assert (made["state"], made["metadata"]) == ("suspended", {"k": "v"})
        with hatchway.sandboxes.get(made["id"]) as twin:
            verbs.do(twin, "restore")
            assert twin.run("cat /dev/shm/m sum").stdout == value
            assert twin.run("sha256sum -c sum; echo $A").stdout.split() == ["disk:", "OK", "b"]
            again = next(one for one in verbs.sessions(twin) if one["forked_from"] == counter.id)
            assert any(isinstance(event, Output) for event in hatchway.sessions.get(again["id"]))
            verbs.do(source, "restore")
            assert source.run("cat /etc/machine-id").stdout != twin.run("cat /etc/machine-id").stdout
            verbs.do(twin, "suspend")  # what came from elsewhere is as good as what was made here
            verbs.do(twin, "restore")
            assert twin.run("cat /dev/shm/m sum").stdout == value
            verbs.do(twin, "stop")
            small = archives.fetch(archives.export(twin, include_template=True)).content
        # The disk alone.
        for archive, body in ((octets, {"memory": False, "name": "cold"}), (small, {})):
            made = archives.take_in(archive, **body)
            assert (made["state"], made["name"]) == ("stopped", body.get("name"))
            with hatchway.sandboxes.get(made["id"]) as cold:
                verbs.do(cold, "start")
                assert cold.run("sha256sum -c sum; ls /dev/shm").stdout == "disk: OK\n"

        # Hostile ones: refused by name, and nothing is left of them.
        before = left(service)
        changed = bytearray(octets)
        changed[len(changed) // 2] ^= 1
        strange = octets[:20] + b"x" + octets[21:]
        for bad, word, code in (
            (bytes(changed), None, "archive_altered"),
            (strange, None, "archive_altered"),
            (octets[:-1], None, "archive_invalid"),
            (octets + b"\0", None, "archive_invalid"),
            (octets[:8] + b"\0\0\0\x09" + octets[12:], None, "archive_too_new"),
            (sealed, None, "passphrase_needed"),
            (sealed, "open says me", "passphrase_wrong"),
            (sealed[:-1], "open sesame", "archive_altered"),
            (b"nothing of the kind", None, "archive_invalid"),
        ):
            with pytest.raises(Refused) as caught:
                archives.take_in(bad, word)
            assert str(caught.value) == code
        assert left(service) == before

        # Deleted: nothing is there any more.
        assert verbs.http.delete(f"/v1/exports/{export}").status_code == 204
        assert verbs.http.get(f"/v1/exports/{export}").json()["code"] == "unknown_export"
        assert not list((service.data_dir / "node" / "exports").glob(f"{export}*"))


def test_snapshots_there_and_back(service: Service, verbs: Verbs, tmp_path: Path) -> None:
    archives = Archives(verbs)
    archive = tmp_path / "kept.archive"
    with service.client() as hatchway, hatchway.sandboxes.create(memory_mib=256) as source:
        counter = source.start(["python3", "-c", COUNTER])
        for event in counter:
            if isinstance(event, Output) and b"3\n" in event.data:
                break
        source.run("echo memory > /dev/shm/m; head -c 3000000 /dev/urandom > disk; sha256sum disk > sum; sync")
        value = source.run("cat /dev/shm/m sum").stdout
        full = snapshot(verbs, source, "full")
        first = service.run("export", full["id"], str(archive))
        assert first.returncode == 0, first.stderr
        octets = archive.read_bytes()
        # Nothing of it is here any more: neither its sandbox nor itself.
        source.delete()
        assert verbs.http.delete(f"/v1/snapshots/{full['id']}").status_code == 200
        made = service.run("import", str(archive), "--name", "back", "--json")
        assert made.returncode == 0, made.stderr
        told = json.loads(made.stdout)
        assert (told["made"], told["kind"], told["state"], told["name"]) == ("snapshot", "full", "ready", "back")
        assert (told["origin"]["sandbox"], told["origin"]["snapshot"]) == (source.id, full["id"])
        assert told["memory_bytes"] > 0
        back = hatchway.snapshots.get(told["id"])

        # It goes on where it stood, once and again; what ran runs on, and numbers of processes are used once.
        with hatchway.sandboxes.create(snapshot=back) as one, hatchway.sandboxes.create(snapshot=back) as two:
            for box in (one, two):
                assert box.run("cat /dev/shm/m sum").stdout == value
                assert box.run("sha256sum -c sum").stdout == "disk: OK\n"
                again = next(each for each in verbs.sessions(box) if each["forked_from"] == counter.id)
                assert any(isinstance(event, Output) for event in hatchway.sessions.get(again["id"]))
            assert one.run("cat /etc/machine-id").stdout != two.run("cat /etc/machine-id").stdout

        # Out again, and in without its memory: a disk, which boots.
        export = hatchway.archives.export(back, include_template=True)
        disk = hatchway.archives.load(b"".join(hatchway.archives.fetch(export)), memory=False)
        assert isinstance(disk, Snapshot)
        assert (disk.kind, disk.state, disk.memory_bytes, disk.name) == ("disk", "ready", 0, "back")
        assert disk.origin is not None
        assert (disk.origin["sandbox"], disk.origin["snapshot"]) == (source.id, back.id)
        with hatchway.sandboxes.create(snapshot=disk) as cold:
            assert cold.run("sha256sum -c sum; ls /dev/shm").stdout == "disk: OK\n"

        # Hostile ones: refused, and nothing is left of them.
        before = left(service)
        changed = bytearray(octets)
        changed[len(changed) // 2] ^= 1
        for bad, code in (
            (bytes(changed), "archive_altered"),
            (octets[:-1], "archive_invalid"),
            (octets[:20] + b"x" + octets[21:], "archive_altered"),
        ):
            with pytest.raises(Refused) as caught:
                archives.take_in(bad)
            assert str(caught.value) == code
        assert left(service) == before
        for one_of_them in (back, disk):
            hatchway.snapshots.delete(one_of_them.id)
        assert not {name for name in left(service) if name.startswith("snapshots/")}


def test_the_command_line_and_the_sdk(service: Service, verbs: Verbs, tmp_path: Path) -> None:
    archive = tmp_path / "one.archive"
    with service.client() as hatchway, hatchway.sandboxes.create(memory_mib=256, name="one") as source:
        source.run("echo kept > kept; sync")
        running = service.run("export", source.id, str(archive))
        assert running.returncode == 1
        assert b"wrong_state" in running.stderr
        verbs.do(source, "stop")
        assert b"bad_passphrase" in service.run("export", source.id, str(archive), "--encrypt").stderr
        service.environ["HATCHWAY_PASSPHRASE"] = "a long one"
        try:
            done = service.run("export", source.id, str(archive), "--encrypt")
            assert done.returncode == 0, done.stderr
            assert archive.read_bytes()[:8] == b"HWSEALED"
            assert [path.name for path in tmp_path.iterdir()] == [archive.name]
            made = service.run("import", str(archive), "--name", "two", "--json")
            assert made.returncode == 0, made.stderr
        finally:
            del service.environ["HATCHWAY_PASSPHRASE"]
        two = json.loads(made.stdout)
        assert (two["state"], two["name"]) == ("stopped", "two")
        with hatchway.sandboxes.get(two["id"]) as twin:
            twin.start_vm()
            assert twin.run("cat kept").stdout == "kept\n"
        # The SDK: a download that goes on in the middle, and one that is taken in as it comes.
        export = hatchway.archives.export(source)
        assert [one.id for one in hatchway.archives.list() if one.id == export.id] == [export.id]
        octets = b"".join(hatchway.archives.fetch(export))
        assert b"".join(hatchway.archives.fetch(export, offset=20_000)) == octets[20_000:]
        third = hatchway.archives.load(octets, name="three")
        assert isinstance(third, Sandbox)
        with third:
            assert (third.state, third.info.name) == ("stopped", "three")
        with pytest.raises(Unprocessable, match="archive_invalid"):
            hatchway.archives.load(octets[:-1])
        hatchway.archives.delete(export.id)
