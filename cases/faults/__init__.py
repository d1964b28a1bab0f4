"""The fault catalogue: ways in which real stacks have differed from the reference, each planted in production."""
