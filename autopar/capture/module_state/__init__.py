"""What a forward leaves behind in its modules, and what a capture has to put back.

assigned            buffers that a forward replaces by assignment
module_changes      modes, attributes and requires_grad that a forward changes
leftovers           fake tensors in objects outside of the modules
cumulative_norms    batch norms whose statistics are means over all batches
repeated            state that the next forward would read

Stands on `capture.layer_dedup`; used by `capture.front_end` and ir.
"""
