"""`hatchway up`, `hatchway down` and `hatchway doctor`: prepares the data folder, starts the roles, restarts what dies.

The one room that knows every role, because it starts them; nobody imports it but the CLI's role commands. It holds the
listening sockets, so that a role which is being restarted refuses no one, and it is the preloaded parent that control and
node are forked from, so that they share its memory.
"""
