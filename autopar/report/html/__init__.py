"""The HTML report: one self-contained page.

page                the page and its template (page.html)
page_levels         every graph, and what each pass changed
*_section, model_pages      one part of the page each
layer_picture, schedule_picture     SVG
advice              what to try next

Stands on the texts and tables of report; used by `report.dump`.
"""
