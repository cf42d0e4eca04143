"""`hatchway bench`: what this machine's bare VMM can do, and how near to it the service comes, measured in the same run.

Speaks to a running service through the SDK like any client; the floor drives QEMU by itself on the same baked
snapshot. Called by the CLI alone; may import everything.
"""
