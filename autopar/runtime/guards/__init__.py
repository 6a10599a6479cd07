"""Guards: is a compiled step still valid for the model as it is now?

step_cache                          compiled steps by batch shapes, modes and guards
module_guards, tag_guards, global_state     conditions to recompile on
origin, original_model, module_references, shared_memory, shared_parameters
                                    the original model, changed or shared by user code

Used by `runtime.module`.
"""
