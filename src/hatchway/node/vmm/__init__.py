"""Drives virtual machine monitors.

`seam` says what every driver offers, `qemu` is the driver for QEMU's microvm with `qemu_vm` for one machine of it, `launcher` and
`shim` speak with those two, `probe` finds out what this host can really do. May import `domain` and `wire`; the node's core and
`node.images` call it through `seam`, and `hatchway doctor` calls the probe.
"""
