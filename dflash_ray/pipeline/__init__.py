"""Who computes which batch and when, in which order batches are consumed, and how long to wait for whom.

May import: nothing.
"""
