"""Random modules, stepped on plain torch and on a mesh of one process: torch's effect, or a refusal.

    python -m tests.module_fuzz --programs 20000 --seed 7 --workers 2       random programs
    python -m tests.module_fuzz --each                                      every piece alone, with each of its changes

A program (`program`) is data: pieces (`piece`), each a few lines of Python, and events, what happens between steps. It
is written out as the file of a module, which is imported once for each side (`side`), and what both sides log is
compared (`check`). A program that fails is made small (`shrink`) and printed as a script that runs by itself (`script`).

A piece is one entry in a list: `functions`, `special_functions` (A: custom autograd Functions), `buffers` (B), `reads`
(D: what a forward reads and somebody changes), `modes` (F: gradients off, questions to torch), `hooks` (H), `layers` (P).
"""
