"""`memtop watch --serve`: the dashboard in a browser, one process for each tab.

The page, its terminal and the driver of a tab's process are those of textual-serve and Textual. Who
may open it is decided here: textual-serve checks neither a token nor the headers Host and Origin.
"""
