"""The pipeline in the plan: schedule, split points, token slices, stages.

split_candidates    where a model may be split
stage_balance       split points that balance the stages
slice_lengths, terapipe     lengths of token slices (TeraPipe, Li et al. 2021)
pipeline_plan       the schedule, when the user names none, and the split points, new or kept
step_order          the order of its actions

Stands on cost and schedule; used by `planner.make_plan` and compile.
"""
