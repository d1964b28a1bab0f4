"""Importing this fills ``catalogue.CATALOGUE``: one file a component. It takes torch, which the parser does without."""

from cases.faults import (  # noqa: F401  (they declare their faults)
    caches,
    compressor,
    core,
    experts,
    hyper,
    indexer,
    norms,
    nvfp4,
    rope,
    router,
    sink,
    waiting,
)
