"""Communication: collectives and point-to-point transfers by axis name.

collectives                 asynchronous collectives, waited for later, failures explained, bytes counted
functional_collectives      the same as functional operators, for compiled code
p2p                         sends and receives along the pipeline axis
pairs                       tokens from attention nodes to expert nodes and back
rows                        the bytes of such tokens
context_parallel_comm       exchanges of attention over a sharded sequence
wait_times                  how long a rank waits for others
experts                     questions to experts that other ranks hold, and answers

Stands on `runtime.mesh` and `runtime.fault`.
"""
