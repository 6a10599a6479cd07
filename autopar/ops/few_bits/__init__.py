"""Products of eight-bit operands.

scaled_products      the operators, and a linear layer with them
scaled_experts       grouped products of experts
delayed_scales       scales from the magnitudes of earlier steps
eager_products       the same products of a model that runs eagerly, as a reference
"""
