"""Replicas that leave and return: worlds with meshes of their own that train one model together.

membership          who takes part in which step: one record in a store outside of all replicas
lookout             heartbeats of replicas
replica_group       sums over replicas
state_transfer      the state of a run, from a replica that has it to one that returns
replicas            `autopar.Replicas`

Stands on training.
"""
