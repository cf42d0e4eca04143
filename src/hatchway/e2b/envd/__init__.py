"""What E2B's SDKs take for the agent in a sandbox: commands and files over the Connect protocol and plain HTTP.

`app` lets requests in and leads them on; `connect` and `messages` are the protocol, without I/O, `calls` and `requests` carry it;
`process`, `running`, `processes` and `environment` are the service of commands, `filesystem`, `watching` and `entries` that of what there is;
`fileaccess`, `uploads`, `downloads` and `multipart` the octets of files, `plain` the small rest. All of it asks through the handles of the
client, which `seam` says how to give it. May import the client, `wire`, `domain` and, of the wrapper, what is in no room.
"""
