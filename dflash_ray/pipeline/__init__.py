"""Which target computes which batch and when, in which order the drafter uses them, how long an answer may take, and when a dead actor is
started again.

May import: nothing.
"""
