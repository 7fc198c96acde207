"""Which inputs a model is traced and compared with: `settle` says it for an export.

settle    those given, or what a model says of itself
tried     what its layers take and it runs with
samples   files of real inputs, and their rows in batches
"""
