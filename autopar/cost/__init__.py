"""What graphs and steps cost: seconds, bytes on the wire, bytes of memory. Estimates from shapes; decides nothing.

hardware, topology                    chips, and the links between ranks
flops                                 seconds of a node by a roofline
traffic, step_traffic                 bytes per collective, per graph, per step
memory, stage_memory                  what a rank holds, and how it rises and falls in a step
stage_costs, step_timeline            actions of a pipeline's parts, and a step of it simulated
graph_times, step_estimate            graphs whose transfers run beside computing; step time and MFU of any mesh
module_costs                          what each module computes, exchanges and keeps
axis_shares                           what each axis cuts of a model
attention_costs, attention_timeline, attention_traffic      the same for attention over ranks
expert_traffic                        what token dispatchers send, from numbers alone

Stands on ir, attention, rules and steps. The planner, compile and reports import it.
"""
