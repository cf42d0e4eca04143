"""Drives virtual machine monitors: the `Vmm` seam (`seam.py`), the driver for QEMU's microvm, and the probe that finds out what
this host can really do. May import `domain` and `wire`; the node's core calls it, and `hatchway doctor` calls the probe.
"""
