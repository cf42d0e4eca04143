"""The host end of the guest channel: one link per running sandbox to the agent that is PID 1 in it.

`link` holds the link and its verbs, `connection` the socket, `requests` what waits for an answer, `processes` what the guest
may say of a process, `streams` the node's own programs and connections in it. May import `domain` and `wire`; the node's core and its sessions use it through `seam`.
"""
