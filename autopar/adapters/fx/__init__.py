"""Fast creation of torch.fx graphs.

graph_nodes         nodes without the search of arguments for symbolic numbers
graph_data          graphs and fake tensors from data in a file
lazy                graph modules that generate their code when it is run or printed

Every other package may import this one, which imports nothing of the project.
"""
