"""The database: tables, migrations, guarded transitions, the outbox of events. The only SQL is here.

May import `domain` and `wire`. The control plane is its only caller; one control process owns an SQLite file at a time. What the
database promises is written as functions that take a connection and run in one transaction each (`Database.write`).
"""
