"""Layouts chosen and priced for a model: above `autopar.compile`, as it compiles the layers of candidates.

costed_model       costs of a model's layers on any placement, from compiled models of a few layers
stored_costs       these on disk
priced_layouts     prices of many layouts, from a file
space              the layouts that may be chosen: an entry per axis and option
pricing            prices and bounds of layouts for one cluster and stack
search             the layout with the least time that fits
stack_fit          constants of a stack from measured steps, and which of them these determine
measured_machine   what a machine reaches of its peaks
timed_steps        seconds of real steps
finish             the first layouts of a search measured on the real ranks
sliders            what the page of a choice can vary
explanation        why: neighbours, limits, what was pruned
choice             all of it, for a model on a cluster
machine            for the ranks of a running world

Decisions stand in plans and options; passes know nothing of this package.
"""
