"""Compiled steps on disk: who compiles what has been compiled before, here or on another rank of the node, reads it.

value_codec    values as JSON: what a file may hold, and nothing that runs when it is read
graph_codec    graphs as tables of nodes, targets and notes
step_codec     a compiled step in sections: the facts that every rank needs, and each graph for who runs it
entry_file     a file: whole and unchanged, or none
entry_folder   the folder: finding, writing at once with others, waiting for who compiles, making room
reached        an object as a digest, by content: all that is reached from it, and the code that may run
values_reached the walk over values for it
code_reached   functions: what they are, and what they read by name
libraries      what is not looked into: files of libraries, whose versions count; that nobody has put code into them
step_key       everything that decides the result of a compilation, as one digest
stored_steps   `plan_model` and `compile_model` by way of the folder
ahead          the step of a longer batch, compiled by a process beside the training

An entry is found by its key alone. A key that is too fine costs a compilation, one that is too coarse trains a wrong
model: what is not known to be the same is a miss. Stands on compile and runtime; `api` and the command line import it.
"""
