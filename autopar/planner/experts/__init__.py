"""Expert parallelism in the plan.

expert_plan         which experts are sharded on which axis, and how tokens reach them
expert_axis         the axis, when the user names none
expert_notes        bytes, capacities and routing groups, as notes of the plan
router_groups       node-limited routing (DeepSeek-V3, 2.1.2)

Stands on cost; used by `planner.make_plan`.
"""
