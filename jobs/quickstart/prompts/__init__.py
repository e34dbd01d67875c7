"""The prompts that the quickstart's conversations were made from.

May import: nothing.
"""
