"""The runtime: runs compiled steps on a mesh of processes; knows step graphs and orders, not how they were made.

fault               failures: named on every rank, in bounded time
mesh                process groups, devices, timeouts
comm                collectives, point-to-point, exchanges of attention
params              sharded parameters and what operators do with them
consistency         what must be the same on several ranks
exec                lowering and execution of step graphs
inputs              batches, padding, outputs
optim               optimizers on shards, clipping, loss scaling
checkpoint          files: checkpoints, safetensors
guards              what a compiled step depends on
module              `ParallelModule`
training            launch, data, save and load
replicas            worlds that train together, and may leave and return
schedules           pipeline schedules, as data

Stands on steps, ir and attention. `autopar.api`, verification and the command line import it.
"""
