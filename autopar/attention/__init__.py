"""Attention over a sequence that is sharded over ranks (context parallelism), without the algorithms themselves.

problem, layouts            which queries and keys a rank holds, which pairs a mask allows
exchanges, algorithm        the interface of an algorithm, and the exchanges that it is written with
algorithm_table             name -> algorithm; `autopar.passes.attention` fills it
attend                      what an algorithm calls: some rows attend to some columns
operator                    the operators of local graphs and step graphs
program                     what one rank does, traced by running an algorithm on tensors without data

Imports ir and ops. Rules, costs, the planner, passes and the runtime import it.
"""
