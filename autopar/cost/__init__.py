"""What graphs and steps cost: seconds, bytes on the wire, bytes of memory. Estimates from shapes; decides nothing.

hardware, topology                    chips, and the links between ranks
flops                                 seconds of a node by a roofline
traffic                               bytes per collective, per graph, per step
memory, stage_memory                  memory of a rank, and its course within a step
stage_costs                           actions of pipeline stages, and a simulated step of the pipeline
graph_times, step_estimate            graphs whose transfers overlap with computation; step time and MFU of any mesh,
                                      and what each module computes, exchanges and keeps
axis_shares                           how much of a model each axis shards
attention_costs, attention_timeline   seconds and bytes of attention over ranks
expert_traffic                        traffic of the token dispatchers, from numbers alone
roles, packed_roles, ping_pong        attention and experts on GPUs of their own: from sizes, from the graphs that serve
                                      a model; a step with microbatches that take turns

Stands on ir, attention, rules and steps. The planner, compile and reports import it.
"""
