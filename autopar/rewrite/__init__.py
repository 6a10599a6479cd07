"""What passes are written with and run by.

compilation       what a pass knows besides the graph: mesh, plan, observers
pass_manager      runs passes in order; each invariant that one ensures is checked after every later pass
checks            these invariants, for graphs with placements
step_checks       and for step graphs: results and communication stay as promised, and every gradient arrives with the
                  placement dual to its value's
build             creates nodes with their fake values

Imports ir, rules and plan. Passes, compile and reports import it.
"""
