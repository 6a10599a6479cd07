"""Pipeline schedules as data: which rank does what in which order. Loads no torch.

order             actions such as 2F0, and the rows of all ranks
request           what a schedule is made from, and the table of schedules; `autopar.runtime.schedules` fills it
lowering          adds sends, receives, gathers and reductions
order_checks      whether an order does everything once and moves what it needs, and ends where a transfer keeps
                  its stream until the other end has come, as on NCCL
simulate          when each action runs, and the proof that none waits for ever

Stands on the registry alone. The planner, steps, costs, reports and the runtime import it.
"""
