"""What a rank runs: step graphs of the parts of a model, and the facts that go with them.

graphs       StepGraph, Stage, Pipeline, Compiled: everything before `bind`, the same on all ranks
             and how values of a step are named: a node's name, or grad:h0, saved:relu, output:0
of_rank      which of them one rank runs in a step, how often, and what it sends to other stages

Stands on ir, plan and schedule. Costs, passes, compile, reports and the runtime import it: it is what the two halves of
the system exchange.
"""
