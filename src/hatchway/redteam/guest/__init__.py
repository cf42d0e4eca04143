"""The program that attacks as root of a guest. It is packed and written into the sandbox: standard library alone, nothing of ours.

`attempts` runs scripts, each in a process of its own; `network`, `machine` and `meanwhile` have what scripts call, and
`notes` what they know and tell. Read by the suite, run in guests and in their place; imports nothing outside of this room.
"""
