"""Failures: a rank that dies, hangs or raises is named on every other rank, in bounded time.

errors, error_propagation       errors, and how ranks learn of each other's
heartbeat                       liveness
store_client, store_barrier     the TCP store, with deadlines
call_sequence                   the expected sequence of collective calls
aborts                          how a wait that cannot end is ended

The lowest room of runtime.
"""
