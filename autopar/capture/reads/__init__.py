"""What a forward reads from Python beside its arguments, and guards that notice a change between steps.

forward_reads       collects the reads of one capture
read_values         values, and how each is compared
read_guards         the comparison itself, a few microseconds for a thousand values
code_names, names_read, named_in_code      names that code reads
code_owners         whose code a file is: a library of a known version, or the user's
module_reads        attributes of a module that must not be read
compared_sizes      what a forward decides by sizes and by numbers that it is given
unused_inputs       inputs that have no effect
memos               what a forward keeps for the next one

Stands on adapters; used by the other rooms of capture, by the cache's keys and by `runtime.guards`.
"""
