"""The command line: one file per command, which declares its arguments without loading torch.

main                     finds the command
command, shared_arguments      what a command is, and the arguments that several take
*_command                `plan`, `show`, `verify`, `serve`, `schedule`, `attention`, `experts`, `cache`
compiling, verify_run, demo, algorithms_compared, disaggregation_plan, environment      what they load when they run

Imports everything; only `python -m autopar` imports it.
"""
