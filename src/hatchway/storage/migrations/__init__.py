"""Alembic's migrations, in order; `storage.migrate` runs them when a control process starts.

A released migration is never changed. `HEAD` names the newest one, so that a start on an up-to-date database need not load
Alembic at all.
"""

HEAD = "0015"
