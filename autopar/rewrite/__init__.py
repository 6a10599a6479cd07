"""What passes are written with and run by.

compilation       what a pass knows beside the graph: mesh, plan, who watches
pass_manager      runs passes in order; each fact that one ensures is checked after all that follow
checks            those facts, for placed graphs
step_checks       and for step graphs: what a graph makes and moves stays as promised, and every gradient arrives as
                  its value's placement says
build             makes nodes with their fake values

Stands on ir, rules and plan. Passes, compile and reports import it.
"""
