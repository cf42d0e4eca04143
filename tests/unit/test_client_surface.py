"""The public surface of the SDK: its names, that both clients have the same methods, and that it stands alone."""

import inspect
import subprocess
import sys

import pytest

import hatchway.client
from hatchway.client import aio, sync

NAMES = """
AsyncHatchway AsyncSandbox AsyncSession BadAnswer CommandFailed Conflict ConnectionFailed End Exhausted Exit Forbidden Gap
Gone GuestUsage Hatchway HatchwayError HeadTooLarge HostExhausted HostUsage Internal InvalidRequest Key NewKey NotFound Operation OperationError
OperationFailed Output OutputLimit Result Sandbox SandboxInfo SandboxMetrics ServiceEvent Session SessionEvent SessionInfo Started
StreamLost StreamName Template TooLarge Unauthenticated Unavailable Unprocessable UnsupportedMedia Usage WaitTimeout
"""

METHODS = {
    "Hatchway": "close events",
    "Sandboxes": "create delete get list",
    "Sandbox": "delete id metrics pause refresh resume run sessions start start_vm state stop update wake",
    "Sessions": "get",
    "Session": "attach close close_stdin delete exit id info kill output refresh resize send_signal wait write_stdin",
    "Operations": "cancel get list wait",
    "Templates": "list",
    "Keys": "create delete list",
}


def test_names_are_pinned() -> None:
    assert sorted(hatchway.client.__all__) == NAMES.split()
    for name in hatchway.client.__all__:
        assert getattr(hatchway.client, name) is not None


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_pinned(name: str) -> None:
    public = [member for member in vars(getattr(sync, name)) if not member.startswith("_")]
    assert sorted(public) == METHODS[name].split()


@pytest.mark.parametrize("name", METHODS)
def test_both_clients_have_the_same_methods(name: str) -> None:
    blocking, other = vars(getattr(sync, name)), vars(getattr(aio, f"Async{name}"))
    assert [member for member in other if not member.startswith("_")] == [
        member for member in blocking if not member.startswith("_")
    ]
    for member, function in blocking.items():
        if inspect.isfunction(function) and not member.startswith("_"):
            twin = other[member]
            assert str(inspect.signature(twin)).replace("Async", "").replace(".aio.", ".sync.") == str(
                inspect.signature(function)
            ), member
            assert inspect.getdoc(twin) == inspect.getdoc(function), member


def test_the_client_imports_no_server_code() -> None:
    script = "import sys, hatchway.client; print(*sorted(m for m in sys.modules if m.startswith('hatchway')))"
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert {name.split(".")[1] for name in loaded if "." in name} == {"client"}
