"""One host: its sandboxes, their command sessions, their images, and what clients stream to and from.

`main` is the role's entry, `service` answers the control plane, `sandboxes` and `sandbox` own the VMs. A verb is a module of
functions over a `Sandbox`: `creation`, `pausing`, `suspension`, `branching`, `snapshots`, `exports`, `imports`, and `adoption` after
a restart. They work through `vmm` (the machine monitors), `guest` (the agent in the VM), `images` (templates and baked snapshots) and
`sessions`; `dataplane` is the HTTP side. May import `domain` and `wire`; is imported by the supervisor only.
"""
