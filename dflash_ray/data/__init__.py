"""Conversations, tokens on disk and numbered batches; here lies only which tokens may be anchors.

May import: dflash_ray.
"""
