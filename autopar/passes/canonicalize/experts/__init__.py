"""Experts that a model writes out become a dispatch, grouped products and a combine.

group_experts           runs the files below
expert_loops, expert_rows                loops over masks: what the experts have in common, on rows sorted by expert
expert_sorts            sorts with grouped products
expert_lists            rows of one expert after another
cap_experts             a limit on the tokens of an expert
"""
