"""Folders with everything that a compilation made.

dump                graphs at every level, diffs between passes, the plan, times, bytes, and what the ranks of a
                    pipeline run: text, trace, a section of the page

The top of report; used by `autopar.dump`, the command line and `AUTOPAR_DUMP`.
"""
