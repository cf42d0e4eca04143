"""Command sessions: their records, their kept output, and everybody who follows it.

`sessions` is the host of all sessions (the seam that the node's core calls), `session` one of them and the sink of its
process in the guest, `spool` what is kept of the two streams, `record` the file that survives us. May import `domain`,
`wire` and `node.guest.seam`; is called by the node's core and by `node.dataplane`.
"""
