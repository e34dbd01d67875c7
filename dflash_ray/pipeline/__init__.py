"""The bookkeeping of a run, without Ray: the batch order, who computes which batch, slow targets, deadlines, and when a dead actor is
started again.

May import: nothing.
"""
