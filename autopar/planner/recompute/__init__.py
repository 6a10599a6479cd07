"""Activation checkpointing: which activations to keep and which to recompute.

layer_solver        the Pareto-optimal choices of one layer, and one choice per layer under a budget of bytes
stage_solver        the same for all stages of a pipeline, at every moment of the schedule

Pure data, no torch; used by `compile.ac_solver`.
"""
