"""Layouts chosen and priced for a model: above `autopar.compile`, as it compiles the layers of candidates.

costed_model       costs of a model's layers on any placement, from compiled models of a few layers
priced_layouts     prices of many layouts, from a file

Decisions stand in plans and options; passes know nothing of this package.
"""
