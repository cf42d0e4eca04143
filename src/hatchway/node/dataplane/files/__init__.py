"""Files of a sandbox over HTTP: reading, writing, listing, watching, archives.

`routes` lays out the paths, `access` lets a request in and says what it asks for, `content`, `entries`, `watch` and `archive`
answer, `program` runs the guest's `files` program and believes nothing that it says, `answers` is what it may say, `failures` turns
its errors into ours. The host opens no path of a guest. May import what `dataplane` may; `dataplane.app` takes its routes.
"""
