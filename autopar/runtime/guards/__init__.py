"""Guards: does what a compiled step was made from still hold?

step_cache                          compiled steps by batch shapes, modes and guards
module_guards, tag_guards, global_state     conditions to recompile on
origin, original_model, module_references, shared_memory, shared_parameters
                                    the model that was parallelized, in the hands of somebody else

Used by `runtime.module`.
"""
