"""The HTML report: one self-contained page.

page                the page and its template (page.html), every graph, and what each pass changed
*_section, model_pages      one part of the page each
layer_picture, schedule_picture     SVG

Stands on the texts and tables of report; used by `report.dump`.
"""
