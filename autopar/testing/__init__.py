"""Tools to test a new sharding rule, algorithm, pass or model in one process.

    soundness.unsound(call(aten.op.default, x, y), mesh)    every placement that a rule accepts, against the unsharded
    call harness.check_model(model, batch, mesh, options)         all ranks of a mesh in lockstep, against one process
    attention_ranks.attend_over_ranks(name, case)            an attention algorithm on threads, one per rank
    reference.eager(model, batch)                            loss and gradients of one process

Assertions of a test suite are built on these; docs/adding.md walks through them. Only tests and scripts import this
room.
"""
