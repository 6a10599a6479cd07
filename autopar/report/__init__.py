"""Everything that prints, draws, dumps or shows progress.

graph_text, summary, comparison, tables, human_numbers      text for terminals and files
page, page_levels, folded_text                               the HTML report, and graphs on it
model_pages, model_section, model_tree, cut_words, layer_picture   what it says of the model, first
advice                                                       what to try next, by the numbers
attention_section, pipeline_section, pipeline_summary        its further sections
svg, schedule_picture, schedule_grid, attention_picture      pictures
schedule_summary, chrome_trace                               what a schedule comes to, and its trace
dump, pipeline_dump, progress                                who writes them while a model is compiled

Stands on costs and plans, and changes neither. The interface and the command line import it; the runtime does not.
"""
