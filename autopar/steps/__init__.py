"""What a rank runs: step graphs of the stages of a model, and their metadata.

graphs       StepGraph, Stage, Pipeline, Compiled: everything before lowering, the same on all ranks
             and how values of a step are named: a node's name, or grad:h0, saved:relu, output:0
packed       the graphs that serve a model; packed_experts: those of experts in a role of their own
of_rank      which of them one rank runs in a step, how often, and what it sends to other stages

Imports ir, plan and schedule. Costs, passes, compile, reports and the runtime import it: it is the interface between
compiler and runtime.
"""
