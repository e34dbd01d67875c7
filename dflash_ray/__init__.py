"""What makes sense without Ray: one folder is one room; the files here are what every room may use.

May import: nothing.
"""
