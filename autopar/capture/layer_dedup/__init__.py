"""Layers that are called alike are traced once (compare torch's `nested_compile_region`).

layer_signature     what a module's forward can read: equal signatures, equal graphs
layer_template      the nodes that one layer made, as a template
layer_dedup         the tracer that instantiates templates

Stands on `capture.side_effects`; used by `capture.trace`.
"""
