"""The production side: the components under test, the checkpoint reader, and the model assembled from them.

``production.build:model`` is the entry. Nothing here imports the harness, the reference or transformers: what the
harness needs of a stage is met by shape (``production/stage.py``), and every formula and format is written once more.
"""
