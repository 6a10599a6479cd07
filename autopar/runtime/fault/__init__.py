"""Failures: a rank that dies, hangs or raises is named on every other rank, in bounded time.

errors, error_propagation       errors, and how they reach other ranks
heartbeat                       liveness
store_client, store_barrier     the TCP store, with deadlines
call_sequence                   the expected sequence of collective calls
aborts                          ends waits that cannot finish

The lowest layer of runtime.
"""
