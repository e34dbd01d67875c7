"""The library: everything that does not import Ray. Each folder is one part, a room; every room may use the files directly here.

May import: nothing.
"""
