"""What production keeps between calls: pages, the window ring, compressor states, indexer keys.

Everything here is addressed by absolute position, and the length of a sequence is the only thing that is committed.
So a rollback is a smaller length, a chunk may end anywhere, and nothing counts from the start of a call.
"""
