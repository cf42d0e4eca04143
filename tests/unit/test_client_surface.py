"""The public surface of the SDK: its names, that both clients have the same methods, and that it stands alone."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

import hatchway.client
from hatchway.client import (
    aarchives,
    acredentials,
    afiles,
    aio,
    aoversight,
    apolicies,
    archives,
    arecords,
    atenancy,
    aterminal,
    credentials,
    files,
    forwarding,
    oversight,
    policies,
    records,
    sync,
    tenancy,
    terminal,
)

NAMES = """
Approval AsyncFiles AsyncForward AsyncHatchway AsyncSandbox AsyncSession AsyncTerminal AuditHead AuditRecord BadAnswer BadGateway CommandFailed
Conflict ConnectionFailed Credential EffectivePolicy End Exhausted Exit Export FileChange FileEntry FileHead Files Forbidden Forward Gap Gone GuestUsage
Hatchway HatchwayError HeadTooLarge HostExhausted HostUsage Internal InvalidRequest Key LeadsTo Limits MasterKey Misdirected
NewKey NotFound Operation OperationError OperationFailed Output OutputLimit Policy Pool Project RangeUnsatisfiable Result Sandbox
SandboxInfo SandboxMetrics SandboxToken ServiceEvent Session SessionEvent SessionInfo Snapshot Started
StreamLost StreamName Template Terminal Token TooLarge TooSlow Transfer TransferFailed Unauthenticated Unavailable
Unprocessable UnsafeArchive UnsupportedMedia Usage WaitTimeout
"""

METHODS = {
    "Files": "chmod download exists list mark mkdir move open pack read read_text remove seeing stat stream unpack upload watch write",
    "Terminal": "close connect delete exit id info resize send send_eof send_signal wait",
    "Forward": "close host open port",
    "Hatchway": "close events",
    "Sandboxes": "create delete get list metrics",
    "Sandbox": (
        "delete extend files fork forward id metrics pause port_link port_url refresh restore resume rollback run session sessions snapshot"
        " snapshots start start_vm state stop suspend terminal token update wake"
    ),
    "Sessions": "get",
    "Session": "append_stdin attach close close_stdin delete exit id info kill output refresh resize send_signal terminal wait write_stdin",
    "Operations": "cancel get list wait",
    "Snapshots": "delete get list",
    "Pools": "delete get list put",
    "Policies": "check delete get list of_sandbox put",
    "Templates": "get list",
    "Keys": "create delete get list own rotate",
    "Credentials": "delete get list put rotate_key",
    "Projects": "create delete get list update",
    "Tokens": "list revoke revoke_all",
    "Approvals": "allow deny get list",
    "Audit": "export follow head list",
    "Archives": "delete export fetch get list load load_from",
}


def class_of(name: str) -> type:
    modules = (
        sync,
        aio,
        records,
        arecords,
        policies,
        apolicies,
        tenancy,
        atenancy,
        oversight,
        aoversight,
        credentials,
        acredentials,
        archives,
        aarchives,
        files,
        afiles,
        terminal,
        aterminal,
        forwarding,
    )
    return next(getattr(module, name) for module in modules if hasattr(module, name))  # type: ignore[no-any-return]  # a class


def signature(function: Callable[..., object]) -> str:
    text = str(inspect.signature(function))
    return re.sub(
        r"\.a(io|archives|credentials|files|oversight|policies|records|tenancy|terminal)\.",
        r".\1.",
        text.replace("Async", ""),
    ).replace(".io.", ".sync.")


def test_names_are_pinned() -> None:
    assert sorted(hatchway.client.__all__) == NAMES.split()
    for name in hatchway.client.__all__:
        assert getattr(hatchway.client, name) is not None


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_pinned(name: str) -> None:
    public = [member for member in vars(class_of(name)) if not member.startswith("_")]
    assert sorted(public) == METHODS[name].split()


@pytest.mark.parametrize("name", METHODS)
def test_both_clients_have_the_same_methods(name: str) -> None:
    blocking, other = vars(class_of(name)), vars(class_of(f"Async{name}"))
    assert [member for member in other if not member.startswith("_")] == [
        member for member in blocking if not member.startswith("_")
    ]
    for member, function in blocking.items():
        if inspect.isfunction(function) and not member.startswith("_"):
            twin = other[member]
            assert signature(twin) == signature(function), member
            assert inspect.getdoc(twin) == inspect.getdoc(function), member


def test_the_client_imports_no_server_code() -> None:
    script = "import sys, hatchway.client; print(*sorted(m for m in sys.modules if m.startswith('hatchway')))"
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert {name.split(".")[1] for name in loaded if "." in name} == {"client"}
