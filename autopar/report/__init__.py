"""Everything that prints, draws, dumps or shows progress.

graph_text, summary, attention_summary, schedule_summary, disaggregation_summary, tables      text
model_tree          the model, as people read it
svg, attention_picture, chrome_trace      pictures and traces
html                the HTML report
dump                folders with every graph
progress            what the compiler is doing

Stands on cost and plans, and changes neither. The interface and the command line import it; the runtime does not.
"""
