"""Sandboxes start from one snapshot and are told apart by everything that a program may take for its own."""

import time

import pytest
from conftest import Service

pytestmark = pytest.mark.vm

SCRIPT = """
import random, secrets, socket, time, uuid
print(open("/etc/machine-id").read().strip())
print(socket.gethostname())
print(secrets.token_hex(16))
print(random.random())
print(uuid.uuid4())
print(time.time())
"""


def test_no_two_are_alike(service: Service) -> None:
    with service.client() as hatchway:
        sandboxes = [hatchway.sandboxes.create() for _ in range(3)]
        try:
            said = []
            for sandbox in sandboxes:
                before = time.time()
                *identity, clock = sandbox.run(["python3", "-c", SCRIPT]).check().stdout.split()
                assert before - 1 <= float(clock) <= time.time() + 1
                said.append(identity)
            for values in zip(*said, strict=True):
                assert len(set(values)) == len(sandboxes), values
        finally:
            for sandbox in sandboxes:
                sandbox.delete()
