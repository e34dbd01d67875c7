"""Carries features from a target to the drafter, through Ray's object store or directly between GPUs of one host.

May import: nothing.
"""
