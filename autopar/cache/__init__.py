"""The compile cache: plans and compiled steps on disk, shared by ranks and jobs.

compile_cache       `plan_model` and `compile_model` through the cache
step_key            fingerprint of all that determines the result of a compilation
own_sources         digest of autopar's sources; whether functions in them were replaced
step_codec          a compiled step as sections: what every rank needs, and each graph
graph_codec         graphs as tables of nodes, call targets and metadata
value_codec         values as JSON, which can be read without running code
stored_operators    operators that a stored step may call
disk_cache          the folder: lookup, concurrent writers, waiting for a compilation, eviction
entry_file          a signed, compressed file
background_compile  compiles the step of a longer batch in a process beside the training

An entry is found by its key alone. A key that is too fine costs a compilation, one that is too coarse trains a wrong
model, so anything that cannot be compared is a miss. Stands on compile and runtime; `api` and the command line import
it.
"""
