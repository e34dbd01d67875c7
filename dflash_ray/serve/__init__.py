"""Cached decoding: one engine for plain, speculative and batched generation, with exact rollback."""
