"""Workers: fetch, execute, finish, keep leases, supervise processes.

Nothing is imported here: a child process imports this package before Django is set up.
"""
