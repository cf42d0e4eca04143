"""The policy language: what may leave a sandbox. Pure: documents in, verdicts out; no sockets, no clock but the one that is given.

Imports nothing of ours but `domain`. The control plane checks documents with it, a gateway decides with it, `hatchway policy`
explains with it: all three by the same code.
"""
