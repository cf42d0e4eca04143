"""The limits of a session, from the API to the kernel of the guest: each holds, says why it ended the command, and harms no other."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from conftest import Service

from hatchway.client import Sandbox

pytestmark = pytest.mark.vm

WITHIN_S = 120


@pytest.fixture(scope="module")
def sandbox(service: Service) -> Iterator[Sandbox]:
    with service.client() as hatchway, hatchway.sandboxes.create() as sandbox:
        yield sandbox


def end_of(service: Service, sandbox: Sandbox, command: str, **limits: Any) -> tuple[dict[str, Any], str]:
    """Runs a command to its end; returns its `exit` and what it printed."""
    made = httpx.post(
        f"{service.url}/v1/sandboxes/{sandbox.id}/sessions",
        json={"argv": ["/bin/sh", "-c", command], "stdin": False, "limits": limits},
        headers={"authorization": f"Bearer {service.key}"},
    )
    assert made.status_code == 201, made.text
    session = made.json()["session"]
    token = {"authorization": f"Bearer {session['token']}"}
    httpx.post(session["attach_url"], headers=token, timeout=WITHIN_S)  # until the end
    output = httpx.get(session["attach_url"].replace("/attach", "/output"), headers=token, timeout=WITHIN_S)
    shown = httpx.get(f"{service.url}/v1/sessions/{session['id']}", headers={"authorization": f"Bearer {service.key}"})
    return shown.json()["session"]["exit"], output.text


def test_each_limit_holds_and_says_so(service: Service, sandbox: Sandbox) -> None:
    end, _ = end_of(service, sandbox, "while :; do :; done", cpu_s=0.5)
    assert (end["reason"], end["message"]) == ("timeout", "cpu time")
    end, _ = end_of(service, sandbox, "exec python3 -c 'x = bytearray(200 << 20); print(len(x))'", memory_mib=48)
    assert end["reason"] == "oom"
    _, output = end_of(service, sandbox, "ulimit -n", open_files=37)
    assert output == "37\n"
    _, output = end_of(service, sandbox, "head -c 3000000 /dev/zero > big; stat -c %s big; rm big", file_size_mib=1)
    assert output == "1048576\n"
    code = "import os,time\\nn=0\\ntry:\\n while n<50:\\n  n+=1\\n  if os.fork()==0: time.sleep(60)\\nexcept OSError: print('held', n)"
    end, output = end_of(service, sandbox, f'printf "{code}" > f.py; python3 f.py; kill 0', processes=8)
    assert output.startswith("held "), output
    assert sandbox.run("echo well").stdout == "well\n"
