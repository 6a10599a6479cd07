"""Graphs of torch.fx, made without what torch does for every node.

graph_nodes         nodes without the search of arguments for symbolic numbers
graph_data          graphs and fake tensors from data in a file
lazy                graph modules that write their Python code when somebody runs or prints it

Everything may import this room; it imports nothing of the project.
"""
