"""Expert parallelism in the plan.

expert_plan         which experts are sharded on which axis, and how tokens reach them; notes of the plan
disaggregation      whether to serve attention and experts on GPUs of their own (MegaScale-Infer)
expert_axis         the axis, if the user names none; node-limited routing (DeepSeek-V3, 2.1.2)

Stands on cost; used by `planner.make_plan`.
"""
