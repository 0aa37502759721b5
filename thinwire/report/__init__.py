"""`thinwire report`: run folders, advice and cluster measurements become one page that opens offline.

inputs.py reads and checks the files, gather.py turns them into what the page shows, page.py puts page.html, report.css,
chart.js and report.js together with it, figures.py draws the same for papers where matplotlib is installed.
"""
