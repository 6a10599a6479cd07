"""Everything that prints, draws, dumps or shows progress.

graph_text, summary, tables, human_numbers, layer_names      text for terminals and files
page, attention_section, pipeline_section, pipeline_summary  the HTML report and its sections
svg, schedule_picture, schedule_grid, attention_picture      pictures
schedule_summary, chrome_trace                               what a schedule comes to, and its trace
dump, pipeline_dump, progress                                who writes them while a model is compiled

Stands on costs and plans, and changes neither. The interface and the command line import it; the runtime does not.
"""
