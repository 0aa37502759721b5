"""`thinwire report`: run folders, advice and cluster measurements become one page that opens offline.

inputs.py reads and checks the files; gather.py, headline.py and scaling.py turn them into what the page shows; page.py
puts page.html, report.css and the scripts together with it. In the page chart.js draws, pointer.js shows values under
the pointer, tables.js makes tables, report.js says what is shown where. figures.py draws the same for papers.
"""
