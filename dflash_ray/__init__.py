"""All code that does not import Ray. Each folder is one part, called a room; every room may use the files directly in this folder.

May import: nothing.
"""
