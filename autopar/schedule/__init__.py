"""Pipeline schedules as data: which rank does what in which order. Loads no torch.

order             actions such as 2F0, and the rows of all ranks
request           what a schedule is made from, and the table of schedules; `autopar.runtime.schedules` fills it
lowering          adds sends, receives, gathers and reductions
order_checks      whether an order runs every action once with matching transfers, and does not deadlock if a transfer
                  blocks its stream until the other end arrives, as on NCCL
simulate          when each action runs, and the proof that there is no deadlock
critical_path     the seconds of a step for any times of its stages, fast enough for a search
formulas          bubble and memory in closed form, for equal stages

Stands on the registry alone. The planner, steps, costs, reports and the runtime import it.
"""
