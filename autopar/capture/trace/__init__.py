"""From a module to a functional graph: torch.export, then decomposition to core operators.

export              calls torch.export and explains its errors
decompose           training graph -> flat functional graph, with `decompositions`
op_decomposition    which core operators an operator and its derivative are made of (`call_recorder`, `aot`, `effects`)
stack_lines         the line of the model that made a node
program_checks      what an exported program contains that no step can run
deterministic_sets, frame_stack, gc_pause      how Python behaves meanwhile

Imported by `capture.front_end`, ir and rules.
"""
