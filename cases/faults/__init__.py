"""The fault catalogue: ways in which real stacks have differed from the reference, each planted in production.

One file a component. Importing the package fills ``catalogue.CATALOGUE``.
"""

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
